#pragma once

#include "gemm/call.h"

namespace tilewise::cuda::gemm {

/// Products as cuBLASLt makes them, by the algorithm it deems best, which is asked for once a problem. An
/// activation is a pass of its own.
void run_cublaslt(const GemmCall& call, const Context& context);

/// Bytes of workspace that algorithm takes.
std::size_t cublaslt_workspace(const GemmCall& call, const Context& context);

/// out = f(out), f being the call's activation.
void activate_in_place(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
