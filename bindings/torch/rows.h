#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "kinds.h"
#include "runtime.h"

namespace tilewise::torch_binding {

// Helpers that the operators of a layer share.

using OptionalTensor = std::optional<TorchTensor>;

/// A view of rows with a contiguous last dimension. Other tensors are replaced by a copy.
inline Tensor row_view(TorchTensor& rows, std::string_view name) {
  rows = with_contiguous_last(rows);
  return view(rows, name, floating);
}
inline Tensor row_view(OptionalTensor& rows, std::string_view name) {
  return rows ? row_view(*rows, name) : Tensor();
}

/// A context on the device of the tensor, for a call that is only checked.
inline Context planning_context(const Tensor& tensor) {
  return {.device = tensor.device, .parallel_for = {}};
}

/// Allocates the gradients that are needed, in order. The views of the others are "not given".
class GradientMemory {
 public:
  explicit GradientMemory(const std::vector<bool>& needed) : needed_(needed) {}

  Tensor next(const Tensor& like, std::string_view name) {
    const std::size_t index = next_++;
    if (index >= needed_.size() || !needed_[index] || !like.given()) return {};
    memory_.push_back(empty_like(like));
    return view(memory_.back(), name, floating);
  }
  std::vector<TorchTensor>& memory() { return memory_; }

 private:
  const std::vector<bool>& needed_;
  std::size_t next_ = 0;
  std::vector<TorchTensor> memory_;
};

}  // namespace tilewise::torch_binding
