#pragma once

#include "cuda/mma_f32/backward_space.h"

namespace tilewise::cuda::mma_f32 {

/// Adds to dv what its peaks lack.
void mend_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream);

}  // namespace tilewise::cuda::mma_f32
