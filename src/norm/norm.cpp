#include "tilewise/norm.h"

#include "core/plan.h"
#include "norm/kernel.h"
#include "norm/validate.h"

namespace tilewise {

template <>
struct NormPlan::State : PlanState<NormKernel> {
  using PlanState::PlanState;
};
template <>
struct NormBackwardPlan::State : PlanState<NormKernel> {
  using PlanState::PlanState;
};
template class Plan<NormInputs, NormOutputs>;
template class Plan<NormInputs, NormGradients>;

using NormForward = PassOf<NormPlan, norm_kernel_list, checked_norm_forward>;
using NormBackward = PassOf<NormBackwardPlan, norm_kernel_list, checked_norm_backward>;

NormPlan plan_norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                           const Context& context) {
  return NormForward::plan(inputs, options, outputs, context);
}

void norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                  const Context& context) {
  plan_norm_forward(inputs, options, outputs, context).run(context);
}

void check_norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                        const Context& context) {
  checked_norm_forward(inputs, options, outputs, context);
}

std::size_t norm_forward_workspace(const NormInputs& inputs, const NormOptions& options,
                                   const NormOutputs& outputs, const Context& context) {
  return NormForward::workspace(inputs, options, outputs, context);
}

Explanation explain_norm_forward(const NormInputs& inputs, const NormOptions& options,
                                 const NormOutputs& outputs, const Context& context) {
  return NormForward::explain(inputs, options, outputs, context);
}

NormBackwardPlan plan_norm_backward(const NormInputs& inputs, const NormOptions& options,
                                    const NormGradients& gradients, const Context& context) {
  return NormBackward::plan(inputs, options, gradients, context);
}

void norm_backward(const NormInputs& inputs, const NormOptions& options, const NormGradients& gradients,
                   const Context& context) {
  plan_norm_backward(inputs, options, gradients, context).run(context);
}

std::size_t norm_backward_workspace(const NormInputs& inputs, const NormOptions& options,
                                    const NormGradients& gradients, const Context& context) {
  return NormBackward::workspace(inputs, options, gradients, context);
}

Explanation explain_norm_backward(const NormInputs& inputs, const NormOptions& options,
                                  const NormGradients& gradients, const Context& context) {
  return NormBackward::explain(inputs, options, gradients, context);
}

std::vector<std::string_view> norm_kernels() { return kernel_names(norm_kernel_list()); }

}  // namespace tilewise
