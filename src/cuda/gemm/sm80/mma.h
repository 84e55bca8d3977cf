#pragma once

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

/// GEMM of 16-bit operands on tensor cores from sm_80 on, for any strides.
void run_mma(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
