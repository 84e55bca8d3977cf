#pragma once

#include "cuda/mma_f32/backward_space.h"

namespace tilewise::cuda::mma_f32 {

/// What backward knows of every query before the walk. Makes dq 0, and clears the peaks.
void row_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream);

/// Makes dk and dv 0.
void clear_key_gradients(const AttentionCall& call, cudaStream_t stream);

/// Adds to dv what its peaks lack.
void mend_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream);

}  // namespace tilewise::cuda::mma_f32
