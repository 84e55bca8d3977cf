#pragma once

#include <cuda_runtime_api.h>

#include "attention/call.h"
#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/simt/fused.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// The parts of backward beside dq, dk and dv.

/// Whether dmask has one element a row of scores, so that row sums are all it needs.
inline bool sums_rows(const AttentionCall& call) {
  return call.problem.features.mask_gradient && call.dmask.extent[3] == 1;
}

/// The state of every query; and, where not null, the sum of its score gradients. Makes `dq_sum` 0 where
/// wanted.
void row_states(const AttentionCall& call, const RowStates& states, float* row_sums, const Rows& dq_sum,
                const Context& context);
/// The states of queries of short sequences alone (peaks.h), of some heads; for plain calls.
void row_states_of_short(const AttentionCall& call, const RowStates& states, const SomeHeads& heads,
                         const Context& context);

/// dsinks[h]: the sink's weight times the shift, over entries and queries.
void sink_gradient(const AttentionCall& call, const RowStates& states, cudaStream_t stream);

/// What each query gives to the gradient of its head's logit scale, [Hq, rows_q]: q·dq over it, from dq in
/// f32. Finishes dq where the scale is 0 (differentiable() in score.cuh).
void logit_scale_rows(const AttentionCall& call, const Rows& dq, float* rows, cudaStream_t stream);
/// dlogit_scale[h]: these, over entries and queries.
void logit_scale_gradient(const AttentionCall& call, const float* rows, cudaStream_t stream);

/// dmask: score gradients recomputed for each element of the mask and summed over what it was broadcast
/// along.
void mask_gradient(const AttentionCall& call, const RowStates& states, const float* row_sums,
                   const Context& context);

/// Rows of packed tensors that no sequence owns, and those beyond its longest: o = 0, lse = −inf.
void clear_unused_outputs(const AttentionCall& call, cudaStream_t stream);

/// The same for gradients, and for keys past an entry's length: 0.
void clear_unused_gradients(const AttentionCall& call, cudaStream_t stream);

}  // namespace tilewise::cuda::simt
