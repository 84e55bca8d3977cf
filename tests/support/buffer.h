#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "support/random.h"
#include "tilewise/attention.h"
#include "tilewise/tensor.h"

namespace tilewise::test {

using Shape = std::vector<std::int64_t>;

/// The memory layout of a Buffer. The default is row-major without gaps. All lists may be shorter than the
/// rank.
struct Placement {
  /// The dimensions from the outermost in memory to the innermost: {0, 2, 1, 3} is BSHD.
  std::vector<int> order{};
  Shape padding{};              ///< elements allocated past the end of each dimension: {0, 0, 0, 5} pads rows
  std::vector<int> expanded{};  ///< dimensions of stride 0
  std::vector<int> flipped{};   ///< dimensions of negative stride
  std::int64_t step = 1;        ///< stride of the innermost dimension
  std::int64_t lead = 0;        ///< elements skipped at the start, so that data is not aligned to 64 bytes
};

/// A tensor that owns its memory. Memory that belongs to no element (before and after the tensor, and in gaps
/// between rows) holds a guard pattern that is NaN in every floating type. Results show if it was read,
/// guards_intact() says if it was written. A default Buffer is "not given"; an empty one has null data, like
/// empty tensors of frameworks.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, Shape shape, const Placement& placement = {});

  /// Tensors [B, H, S, D] (or packed [S, H, D]) as slices of one allocation, like the packed QKV of a
  /// projection. Each token has its rows of the first tensor, then those of the second, and so on. B and S
  /// must agree.
  static std::vector<Buffer> side_by_side(DType dtype, std::span<const Shape> shapes);

  bool given() const { return storage_ != nullptr; }
  Tensor view() const;
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  std::int64_t extent(int dim) const { return shape_[static_cast<std::size_t>(dim)]; }
  std::int64_t size() const;

  template <typename... Index>
  double at(Index... index) const {
    const std::int64_t indices[] = {static_cast<std::int64_t>(index)...};
    return load(offset_of(indices));
  }
  /// Sets an element to the value, rounded to the type.
  void set(std::initializer_list<std::int64_t> index, double value) {
    set({index.begin(), index.size()}, value);
  }
  void set(std::span<const std::int64_t> index, double value) { store(offset_of(index), value); }
  /// All elements as doubles in row-major order, and back.
  std::vector<double> values() const;
  void set_values(std::span<const double> values);

  void fill(double value);
  /// Fills with normally distributed numbers of standard deviation `scale`; booleans are true with a chance
  /// of 0.5.
  void fill_random(Random& rng, double scale = 1);
  /// Sets all bytes of elements to 0xFF: NaN in every floating type, true for booleans, -1 for integers.
  void poison();
  /// Whether every element was written since poison().
  bool all_written() const;
  /// Whether nothing was written outside the elements of this Buffer and of those with which it shares
  /// memory.
  bool guards_intact() const;
  /// The bytes of the elements in row-major order, for bitwise comparison.
  std::vector<std::byte> bytes() const;

 private:
  struct Storage;

  void place(std::shared_ptr<Storage> storage, std::int64_t first);
  std::int64_t offset_of(std::span<const std::int64_t> index) const;
  double load(std::int64_t offset) const;
  void store(std::int64_t offset, double value);
  template <typename Body>
  void for_each_offset(const Body& body) const;
  template <typename Body>
  void for_each_run(const Body& body) const;

  std::shared_ptr<Storage> storage_;
  std::byte* data_ = nullptr;  // the element with index 0
  DType dtype_ = DType::f32;
  Shape shape_;
  Shape strides_;
};

/// Thrown if a call wrote outside its tensors or its workspace.
struct GuardError : std::logic_error {
  using std::logic_error::logic_error;
};

/// Calls body with a workspace of exactly `bytes`, which is poisoned and lies at an odd address between
/// guards. Throws GuardError if a guard was written.
void with_workspace(std::size_t bytes, const std::function<void(Workspace)>& body);

/// Dropout's seed and offset in memory, for AttentionInputs::dropout_seed.
Buffer seed_words(const Dropout& dropout);

/// attention_forward and attention_backward with such a workspace, of the size that they need.
void run_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                 const AttentionOutputs& outputs, Context context = {});
void run_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                  const AttentionGradients& gradients, Context context = {});

}  // namespace tilewise::test
