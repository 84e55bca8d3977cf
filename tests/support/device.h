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

/// attention_forward and attention_backward of tensors in host memory on the first CUDA device: they are
/// copied there and back, with guards around each tensor, in its gaps and around the workspace. Throws
/// GuardError when one was hit.
void run_forward_on_cuda(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, Context context = {});
void run_backward_on_cuda(const AttentionInputs& inputs, const AttentionOptions& options,
                          const AttentionGradients& gradients, Context context = {});

/// Any call likewise: `tensors` are moved to the device, which the call and its workspace are then asked on.
/// Tensors that are the same on the host are the same there.
void call_on_cuda(const Context& context, const std::vector<Tensor*>& tensors,
                  const std::function<std::size_t(const Context&)>& workspace,
                  const std::function<void(const Context&)>& call);

/// The same arguments as if their memory were on `device`: for explain, which looks at no data there.
AttentionInputs on_device(AttentionInputs inputs, Device device);
AttentionOutputs on_device(AttentionOutputs outputs, Device device);
AttentionGradients on_device(AttentionGradients gradients, Device device);

}  // namespace tilewise::test
