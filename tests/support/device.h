#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tilewise/attention.h"

namespace tilewise::test {

/// Whether CUDA kernels can be tested here; if not, `reason` says why.
struct CudaPresence {
  bool present = false;
  std::string reason{};
};
CudaPresence cuda_presence();

/// attention_forward and attention_backward on the first CUDA device, for tensors in host memory. Tensors are
/// copied to the device and back. There are guards around each tensor, in its gaps and around the workspace.
/// Throws GuardError if a guard was written.
void run_forward_on_cuda(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, Context context = {});
void run_backward_on_cuda(const AttentionInputs& inputs, const AttentionOptions& options,
                          const AttentionGradients& gradients, Context context = {});

/// The same for any call. Copies `tensors` to the device and then calls `workspace` and `call` with a context
/// on it. Tensors that share their memory on the host share it on the device.
void call_on_cuda(const Context& context, const std::vector<Tensor*>& tensors,
                  const std::function<std::size_t(const Context&)>& workspace,
                  const std::function<void(const Context&)>& call);

/// The same arguments as if their memory were on `device`. For explain, which does not read data on a device.
AttentionInputs on_device(AttentionInputs inputs, Device device);
AttentionOutputs on_device(AttentionOutputs outputs, Device device);
AttentionGradients on_device(AttentionGradients gradients, Device device);

}  // namespace tilewise::test
