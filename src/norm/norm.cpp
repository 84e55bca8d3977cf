#include "tilewise/norm.h"

#include "norm/kernel.h"
#include "norm/validate.h"

namespace tilewise {

void norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                  const Context& context) {
  launch_kernel(norm_kernel_list(), checked_norm_forward(inputs, options, outputs, context), options.kernel,
                context);
}

std::size_t norm_forward_workspace(const NormInputs& inputs, const NormOptions& options,
                                   const NormOutputs& outputs, const Context& context) {
  return kernel_workspace(norm_kernel_list(), checked_norm_forward(inputs, options, outputs, context),
                          options.kernel, context);
}

Explanation explain_norm_forward(const NormInputs& inputs, const NormOptions& options,
                                 const NormOutputs& outputs, const Context& context) {
  return explain_kernels(norm_kernel_list(), checked_norm_forward(inputs, options, outputs, context).problem,
                         options.kernel);
}

void norm_backward(const NormInputs& inputs, const NormOptions& options, const NormGradients& gradients,
                   const Context& context) {
  launch_kernel(norm_kernel_list(), checked_norm_backward(inputs, options, gradients, context),
                options.kernel, context);
}

std::size_t norm_backward_workspace(const NormInputs& inputs, const NormOptions& options,
                                    const NormGradients& gradients, const Context& context) {
  return kernel_workspace(norm_kernel_list(), checked_norm_backward(inputs, options, gradients, context),
                          options.kernel, context);
}

Explanation explain_norm_backward(const NormInputs& inputs, const NormOptions& options,
                                  const NormGradients& gradients, const Context& context) {
  return explain_kernels(norm_kernel_list(),
                         checked_norm_backward(inputs, options, gradients, context).problem, options.kernel);
}

std::vector<std::string_view> norm_kernels() { return kernel_names(norm_kernel_list()); }

}  // namespace tilewise
