#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tilewise/tilewise.h"

namespace tilewise::torch_binding {

using TorchTensor = torch::stable::Tensor;

/// The device of a torch tensor. Throws InvalidArgument for devices that the library does not have. Meta
/// tensors count as tensors on CUDA, which the library checks without reading them.
Device device_of(const TorchTensor& tensor, std::string_view name);

/// The library's view of a torch tensor. Throws InvalidArgument, with what was expected, for types and
/// devices that the library does not have. A tensor without elements gets 1 as its last stride, which may be
/// any number in torch.
Tensor view(const TorchTensor& tensor, std::string_view name, std::string_view expected);

/// The same for indices, which may be i32 or i64.
Tensor index_view(const TorchTensor& tensor, std::string_view name);

/// The tensor itself, or a copy if its last dimension is not contiguous.
TorchTensor with_contiguous_last(const TorchTensor& tensor);

/// A row-major tensor in uninitialised memory of torch's allocator. If there is not enough memory, it throws
/// a std::runtime_error that says how much was requested; the Python package turns it into torch's own
/// exception.
TorchTensor empty(std::span<const std::int64_t> shape, DType dtype, Device device);
TorchTensor empty_like(const Tensor& like);
/// The same with the shape of `like` but another last extent. If `like` stores the heads of one position
/// together, so does the result, and code after attention can join the heads without a copy.
TorchTensor empty_beside(const Tensor& like, std::int64_t last_extent);

/// A row-major view without memory, for the result of a call that is only checked.
Tensor placeholder(std::span<const std::int64_t> shape, DType dtype, Device device);

/// The environment of a call: torch's current stream, thread pool and allocator. As long as this object
/// lives, torch's current device is that of the call.
class Runtime {
 public:
  /// `work` is the number of multiply-adds, which decides whether other threads are used.
  Runtime(Device device, double work);
  const Context& context() const { return context_; }
  /// Runs a plan that was made with this context, with a workspace from torch's allocator.
  template <typename Inputs, typename Outputs>
  void run(const Plan<Inputs, Outputs>& plan) {
    plan.run(with_workspace(plan.workspace_bytes()));
  }

 private:
  const Context& with_workspace(std::size_t bytes);

  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<TorchTensor> workspace_;
  // A workspace for small CPU calls, for which torch's allocator would take longer than the call itself.
  alignas(64) std::array<std::byte, std::size_t{1} << 16> small_;
  Context context_;
};

}  // namespace tilewise::torch_binding
