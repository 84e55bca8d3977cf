#include "tilewise/rope.h"

#include "rope/kernel.h"
#include "rope/validate.h"

namespace tilewise {

void rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
          const Context& context) {
  launch_kernel(rope_kernel_list(), checked_rope(inputs, options, outputs, context), options.kernel, context);
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
