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

GemmPlan plan_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                   const Context& context) {
  return PlanAccess::make<GemmPlan>(gemm_kernel_list(), options.kernel, context,
                                    [&] { return checked_gemm(inputs, options, outputs, context); });
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
  return kernel_workspace(gemm_kernel_list(), checked_gemm(inputs, options, outputs, context), options.kernel,
                          context);
}

Explanation explain_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                         const Context& context) {
  return explain_kernels(gemm_kernel_list(), checked_gemm(inputs, options, outputs, context), options.kernel,
                         context);
}

std::vector<std::string_view> gemm_kernels() { return kernel_names(gemm_kernel_list()); }

}  // namespace tilewise
