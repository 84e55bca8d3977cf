#pragma once

#include <cstddef>

#include "gemm/kernel.h"

namespace tilewise {

/// The products that an operation is made of, each by the first kernel that takes it. Asking for workspace
/// and launching walk the same products.
class Products {
 public:
  explicit Products(const Context& context) : context_(context) {}

  /// `used` bytes of the workspace are the operation's own.
  void launch(const GemmCall& call, std::size_t used) const {
    const GemmKernel& kernel = choose_kernel(gemm_kernel_list(), call.problem, "auto");
    launch_inner(kernel, call, rest_of_workspace(used));
  }
  std::size_t workspace(const GemmCall& call) const {
    return configure_kernel(choose_kernel(gemm_kernel_list(), call.problem, "auto"), call, context_)
        .workspace_bytes;
  }
  Context rest_of_workspace(std::size_t used) const {
    Context context = context_;
    context.workspace.data = static_cast<std::byte*>(context.workspace.data) + used;
    context.workspace.bytes -= used;
    return context;
  }

 private:
  const Context& context_;
};

}  // namespace tilewise
