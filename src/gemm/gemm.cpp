#include "tilewise/gemm.h"

#include "gemm/kernel.h"
#include "gemm/validate.h"

namespace tilewise {

void gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
          const Context& context) {
  launch_kernel(gemm_kernel_list(), checked_gemm(inputs, options, outputs, context), options.kernel, context);
}

std::size_t gemm_workspace(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                           const Context& context) {
  return kernel_workspace(gemm_kernel_list(), checked_gemm(inputs, options, outputs, context), options.kernel,
                          context);
}

Explanation explain_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                         const Context& context) {
  return explain_kernels(gemm_kernel_list(), checked_gemm(inputs, options, outputs, context).problem,
                         options.kernel);
}

std::vector<std::string_view> gemm_kernels() { return kernel_names(gemm_kernel_list()); }

}  // namespace tilewise
