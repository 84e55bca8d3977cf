#pragma once

#include <cuda_runtime_api.h>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// The parts of backward that are no products of tiles. `shifts` is [Hq, rows_q].

/// shift of every query: d_lse − Σ_d d_o·o, or 0 where it saw nothing. Makes `dq_sum` 0 where it is wanted.
void row_shifts(const AttentionCall& call, float* shifts, const Rows& dq_sum, cudaStream_t stream);

/// dsinks[h] = Σ over entries and queries of exp(sink − lse)·shift.
void sink_gradient(const AttentionCall& call, const float* shifts, cudaStream_t stream);

/// dmask: score gradients recomputed for each element of the mask and summed over what it was broadcast
/// along.
void mask_gradient(const AttentionCall& call, const float* shifts, const Context& context);

/// Rows of packed tensors that no sequence owns: o = 0, lse = −inf.
void clear_unused_outputs(const AttentionCall& call, cudaStream_t stream);

/// The same for gradients, and for keys past an entry's length: 0.
void clear_unused_gradients(const AttentionCall& call, cudaStream_t stream);

}  // namespace tilewise::cuda::simt
