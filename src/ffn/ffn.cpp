#include "tilewise/ffn.h"

#include "ffn/kernel.h"
#include "ffn/validate.h"

namespace tilewise {

void ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                 const Context& context) {
  launch_kernel(ffn_kernel_list(), checked_ffn_forward(inputs, options, outputs, context), options.kernel,
                context);
}

std::size_t ffn_forward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                  const FfnOutputs& outputs, const Context& context) {
  return kernel_workspace(ffn_kernel_list(), checked_ffn_forward(inputs, options, outputs, context),
                          options.kernel, context);
}

Explanation explain_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                                const Context& context) {
  return explain_kernels(ffn_kernel_list(), checked_ffn_forward(inputs, options, outputs, context).problem,
                         options.kernel);
}

void ffn_backward(const FfnInputs& inputs, const FfnOptions& options, const FfnGradients& gradients,
                  const Context& context) {
  launch_kernel(ffn_kernel_list(), checked_ffn_backward(inputs, options, gradients, context), options.kernel,
                context);
}

std::size_t ffn_backward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                   const FfnGradients& gradients, const Context& context) {
  return kernel_workspace(ffn_kernel_list(), checked_ffn_backward(inputs, options, gradients, context),
                          options.kernel, context);
}

Explanation explain_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                                 const FfnGradients& gradients, const Context& context) {
  return explain_kernels(ffn_kernel_list(), checked_ffn_backward(inputs, options, gradients, context).problem,
                         options.kernel);
}

std::vector<std::string_view> ffn_kernels() { return kernel_names(ffn_kernel_list()); }

}  // namespace tilewise
