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

/// How a Buffer lies in memory; the default is row-major without gaps. All lists may be shorter than the
/// rank.
struct Placement {
  std::vector<int>
      order{};      ///< dimensions from the outermost in memory to the innermost: {0, 2, 1, 3} is BSHD
  Shape padding{};  ///< elements allocated past the end of each dimension: {0, 0, 0, 5} pads rows
  std::vector<int> expanded{};  ///< dimensions of stride 0
  std::vector<int> flipped{};   ///< dimensions of negative stride
  std::int64_t step = 1;        ///< stride of the innermost dimension
  std::int64_t lead = 0;        ///< elements skipped at the start, so that data is less aligned than 64 bytes
};

/// A tensor that owns its memory. What is not an element (zones before and after, gaps between rows) holds a
/// guard pattern that is NaN in every floating type: reading it shows in results, writing it in
/// guards_intact(). A default Buffer is "not given"; an empty one has null data, as empty tensors of
/// frameworks do.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, Shape shape, const Placement& placement = {});

  /// Tensors [B, H, S, D] (or packed [S, H, D]) as slices of one allocation, like a projection's packed QKV:
  /// each token's rows of the first tensor, then those of the second, and so on. B and S must agree.
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
  /// Rounds to the type.
  void set(std::initializer_list<std::int64_t> index, double value) {
    set({index.begin(), index.size()}, value);
  }
  void set(std::span<const std::int64_t> index, double value) { store(offset_of(index), value); }
  /// All elements as doubles, the last index fastest; and back.
  std::vector<double> values() const;
  void set_values(std::span<const double> values);

  void fill(double value);
  /// Normally distributed floats of that deviation; fair booleans.
  void fill_random(Random& rng, double scale = 1);
  /// All elements to bytes 0xFF: NaN in every floating type, true, or -1.
  void poison();
  /// Whether no element is as poison() left it.
  bool all_written() const;
  /// Whether nothing was written outside the elements of this Buffer and those it shares memory with.
  bool guards_intact() const;
  /// The elements' bytes, the last index fastest: for bitwise comparison.
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
  std::byte* data_ = nullptr;  // of index 0
  DType dtype_ = DType::f32;
  Shape shape_;
  Shape strides_;
};

/// A call wrote where it had no right to.
struct GuardError : std::logic_error {
  using std::logic_error::logic_error;
};

/// Calls body with a workspace of exactly `bytes`: poisoned, at an odd address, between guards. Throws
/// GuardError when a guard was hit.
void with_workspace(std::size_t bytes, const std::function<void(Workspace)>& body);

/// attention_forward and attention_backward with such a workspace, of the size they ask for.
/// Dropout's seed and offset in memory, as AttentionInputs::dropout_seed takes them.
Buffer seed_words(const Dropout& dropout);

void run_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                 const AttentionOutputs& outputs, Context context = {});
void run_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                  const AttentionGradients& gradients, Context context = {});

}  // namespace tilewise::test
