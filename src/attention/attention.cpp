#include "tilewise/attention.h"

#include "attention/kernel.h"
#include "attention/validate.h"

namespace tilewise {

void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context) {
  launch_kernel(attention_kernel_list(), checked_forward(inputs, options, outputs, context), options.kernel,
                context);
}

void attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context) {
  launch_kernel(attention_kernel_list(), checked_backward(inputs, options, gradients, context),
                options.kernel, context);
}

std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                        const AttentionOutputs& outputs, const Context& context) {
  return kernel_workspace(attention_kernel_list(), checked_forward(inputs, options, outputs, context),
                          options.kernel, context);
}

std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                         const AttentionGradients& gradients, const Context& context) {
  return kernel_workspace(attention_kernel_list(), checked_backward(inputs, options, gradients, context),
                          options.kernel, context);
}

Explanation explain_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                      const AttentionOutputs& outputs, const Context& context) {
  return explain_kernels(attention_kernel_list(), checked_forward(inputs, options, outputs, context).problem,
                         options.kernel);
}

Explanation explain_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                       const AttentionGradients& gradients, const Context& context) {
  return explain_kernels(attention_kernel_list(),
                         checked_backward(inputs, options, gradients, context).problem, options.kernel);
}

std::vector<std::string_view> attention_kernels() { return kernel_names(attention_kernel_list()); }

}  // namespace tilewise
