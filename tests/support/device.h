#pragma once

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

/// The same arguments as if their memory were on `device`: for explain, which looks at no data there.
AttentionInputs on_device(AttentionInputs inputs, Device device);
AttentionOutputs on_device(AttentionOutputs outputs, Device device);
AttentionGradients on_device(AttentionGradients gradients, Device device);

}  // namespace tilewise::test
