#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "problem.h"
#include "tilewise/attention.h"

namespace tilewise::bench {

/// The tensors of a problem, with memory. Inputs and dO are random; kernels write the others.
class Operands {
 public:
  explicit Operands(const Problem& problem);

  AttentionInputs inputs;
  AttentionOptions options;
  AttentionOutputs outputs;
  AttentionGradients gradients;

  /// Fills the results of the pass with NaN, so that elements which a kernel fails to write are noticed.
  void spoil_results(Pass pass);
  /// The number of bytes that the pass writes.
  std::size_t result_bytes(Pass pass) const;

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };

  void* allocate(std::size_t bytes);
  Tensor empty(DType dtype, std::initializer_list<std::int64_t> shape);
  Tensor random(DType dtype, std::initializer_list<std::int64_t> shape);
  void make_mask(const Problem& problem);
  void make_blocks(const Problem& problem);
  std::vector<Tensor> results(Pass pass) const;

  std::vector<std::unique_ptr<void, Free>> buffers_;
  std::uint64_t random_state_ = 0x7e11;
};

/// Element `index` of the memory of a tensor of any floating type.
double load(const Tensor& tensor, std::int64_t index);

}  // namespace tilewise::bench
