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

/// Where a torch tensor is. Throws InvalidArgument where the library has no such device. Meta tensors count
/// as CUDA's, which the library checks without reading them.
Device device_of(const TorchTensor& tensor, std::string_view name);

/// The library's view of a torch tensor. Throws InvalidArgument, with what was expected instead, for types
/// and devices the library does not have. The last stride of a tensor without elements is 1: torch may give
/// it any other.
Tensor view(const TorchTensor& tensor, std::string_view name, std::string_view expected);

/// The same for indices, which may be i32 or i64.
Tensor index_view(const TorchTensor& tensor, std::string_view name);

/// The tensor itself, or a copy where its last dimension is not contiguous.
TorchTensor with_contiguous_last(const TorchTensor& tensor);

/// Uninitialised memory of torch's allocator, row-major. Where there is none, a std::runtime_error says how
/// much was asked for; the Python package makes torch's own exception of it.
TorchTensor empty(std::span<const std::int64_t> shape, DType dtype, Device device);
TorchTensor empty_like(const Tensor& like);
/// The same with the shape of `like` but another last extent, and in memory as `like` is: heads outside
/// positions, or inside, where what follows attention can then join the heads without a copy.
TorchTensor empty_beside(const Tensor& like, std::int64_t last_extent);

/// A row-major view for a result of a call that is checked and not made.
Tensor unwritten(std::span<const std::int64_t> shape, DType dtype, Device device);

/// Where and how a call runs: torch's current stream, thread pool and allocator. The device is torch's
/// current one for as long as this lives.
class Runtime {
 public:
  /// `work` counts multiply-adds, and decides whether waking other threads pays.
  Runtime(Device device, double work);
  const Context& context() const { return context_; }
  /// Runs a plan made with this context, in workspace of torch's allocator.
  template <typename Inputs, typename Outputs>
  void run(const Plan<Inputs, Outputs>& plan) {
    plan.run(with_workspace(plan.workspace_bytes()));
  }

 private:
  const Context& with_workspace(std::size_t bytes);

  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<TorchTensor> workspace_;
  // Asking torch's allocator costs more than a small attention itself.
  alignas(64) std::array<std::byte, std::size_t{1} << 16> small_;
  Context context_;
};

}  // namespace tilewise::torch_binding
