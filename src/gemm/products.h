#pragma once

#include <cstddef>

#include "gemm/kernel.h"

namespace tilewise {

/// Runs the GEMMs that another operation consists of, each by the kernel that "auto" chooses. An operation
/// asks for the workspace of the same GEMMs that it launches.
class Products {
 public:
  explicit Products(const Context& context) : context_(context) {}

  /// The operation itself uses the first `used` bytes of the workspace.
  void launch(const GemmCall& call, std::size_t used) const {
    const GemmKernel& kernel = choose_kernel(gemm_kernel_list(), call.problem, "auto");
    launch_inner(kernel, call, remaining_workspace(used));
  }
  std::size_t workspace(const GemmCall& call) const {
    return configure_kernel(choose_kernel(gemm_kernel_list(), call.problem, "auto"), call, context_)
        .workspace_bytes;
  }
  Context remaining_workspace(std::size_t used) const {
    Context context = context_;
    context.workspace.data = static_cast<std::byte*>(context.workspace.data) + used;
    context.workspace.bytes -= used;
    return context;
  }

 private:
  const Context& context_;
};

}  // namespace tilewise
