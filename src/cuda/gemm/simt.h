#pragma once

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

/// A product in f32 on any GPU, for any strides.
void run_simt(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
