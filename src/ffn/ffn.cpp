#include "tilewise/ffn.h"

#include "core/plan.h"
#include "ffn/kernel.h"
#include "ffn/validate.h"

namespace tilewise {

template <>
struct FfnPlan::State : PlanState<FfnKernel> {
  using PlanState::PlanState;
};
template <>
struct FfnBackwardPlan::State : PlanState<FfnKernel> {
  using PlanState::PlanState;
};
template class Plan<FfnInputs, FfnOutputs>;
template class Plan<FfnInputs, FfnGradients>;

using FfnForward = PassOf<FfnPlan, ffn_kernel_list, checked_ffn_forward>;
using FfnBackward = PassOf<FfnBackwardPlan, ffn_kernel_list, checked_ffn_backward>;

FfnPlan plan_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                         const Context& context) {
  return FfnForward::plan(inputs, options, outputs, context);
}

void ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                 const Context& context) {
  plan_ffn_forward(inputs, options, outputs, context).run(context);
}

void check_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                       const Context& context) {
  checked_ffn_forward(inputs, options, outputs, context);
}

std::size_t ffn_forward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                  const FfnOutputs& outputs, const Context& context) {
  return FfnForward::workspace(inputs, options, outputs, context);
}

Explanation explain_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                                const Context& context) {
  return FfnForward::explain(inputs, options, outputs, context);
}

FfnBackwardPlan plan_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                                  const FfnGradients& gradients, const Context& context) {
  return FfnBackward::plan(inputs, options, gradients, context);
}

void ffn_backward(const FfnInputs& inputs, const FfnOptions& options, const FfnGradients& gradients,
                  const Context& context) {
  plan_ffn_backward(inputs, options, gradients, context).run(context);
}

std::size_t ffn_backward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                   const FfnGradients& gradients, const Context& context) {
  return FfnBackward::workspace(inputs, options, gradients, context);
}

Explanation explain_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                                 const FfnGradients& gradients, const Context& context) {
  return FfnBackward::explain(inputs, options, gradients, context);
}

std::vector<std::string_view> ffn_kernels() { return kernel_names(ffn_kernel_list()); }

}  // namespace tilewise
