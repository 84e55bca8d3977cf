#include "tilewise/gemm.h"

#include "core/plan.h"
#include "gemm/kernel.h"
#include "gemm/validate.h"

namespace tilewise {

template <>
struct GemmPlan::State : PlanState<GemmKernel> {
  using PlanState::PlanState;
};
template class Plan<GemmInputs, GemmOutputs>;

using GemmPass = PassOf<GemmPlan, gemm_kernel_list, checked_gemm>;

GemmPlan plan_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                   const Context& context) {
  return GemmPass::plan(inputs, options, outputs, context);
}

void gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
          const Context& context) {
  plan_gemm(inputs, options, outputs, context).run(context);
}

void check_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                const Context& context) {
  checked_gemm(inputs, options, outputs, context);
}

std::size_t gemm_workspace(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                           const Context& context) {
  return GemmPass::workspace(inputs, options, outputs, context);
}

Explanation explain_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                         const Context& context) {
  return GemmPass::explain(inputs, options, outputs, context);
}

std::vector<std::string_view> gemm_kernels() { return kernel_names(gemm_kernel_list()); }

}  // namespace tilewise
