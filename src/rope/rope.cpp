#include "tilewise/rope.h"

#include "core/plan.h"
#include "rope/kernel.h"
#include "rope/validate.h"

namespace tilewise {

template <>
struct RopePlan::State : PlanState<RopeKernel> {
  using PlanState::PlanState;
};
template class Plan<RopeInputs, RopeOutputs>;

RopePlan plan_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                   const Context& context) {
  return PlanAccess::make<RopePlan>(rope_kernel_list(), options.kernel, context, [&] {
    return checked_rope(inputs, options, outputs, context, Contents::unread);
  });
}

void rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
          const Context& context) {
  PlannedCall<RopeKernel>(rope_kernel_list(), options.kernel, context, [&] {
    return checked_rope(inputs, options, outputs, context);
  }).run_once(context);
}

void check_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                const Context& context) {
  checked_rope(inputs, options, outputs, context);
}

std::size_t rope_workspace(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                           const Context& context) {
  return kernel_workspace(rope_kernel_list(), checked_rope(inputs, options, outputs, context), options.kernel,
                          context);
}

Explanation explain_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                         const Context& context) {
  return explain_kernels(rope_kernel_list(), checked_rope(inputs, options, outputs, context).problem,
                         options.kernel);
}

std::vector<std::string_view> rope_kernels() { return kernel_names(rope_kernel_list()); }

}  // namespace tilewise
