#pragma once

#include "gemm/call.h"

namespace tilewise::cuda::gemm {

/// Runs cuBLASLt with the algorithm that its heuristic ranks first, which is asked for once per problem. An
/// activation is a pass of its own.
void run_cublaslt(const GemmCall& call, const Context& context);

/// Bytes of workspace that this algorithm takes.
std::size_t cublaslt_workspace(const GemmCall& call, const Context& context);

/// out = f(out), where f is the call's activation.
void activate_in_place(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
