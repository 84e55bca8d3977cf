#pragma once

#include <cuda_runtime_api.h>

#include "attention/call.h"
#include "cuda/attention/common/backward/row_states.h"
#include "cuda/attention/simt/fused.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// The parts of backward beside dQ, dK and dV.

/// Whether dmask has one element per row of S, so that it needs only the rows' sums.
inline bool sums_rows(const AttentionCall& call) {
  return call.problem.features.mask_gradient && call.dmask.extent[3] == 1;
}

/// Computes the state of every query and, where `row_sums` is not null, the sum of its dS. Clears `dq_sum`
/// where wanted.
void row_states(const AttentionCall& call, const RowStates& states, float* row_sums, const Rows& dq_sum,
                const Context& context);
/// The states of the queries of short sequences alone (peaks.h), for some heads of a plain call.
void row_states_of_short(const AttentionCall& call, const RowStates& states, const SomeHeads& heads,
                         const Context& context);

/// dsinks[h]: Σ P of the sink · (dLSE − delta), over entries and queries.
void sink_gradient(const AttentionCall& call, const RowStates& states, cudaStream_t stream);

/// What each query adds to the gradient of its head's logit scale, [Hq, rows_q]: q·dQ over the scale, from dQ
/// in f32. Where the scale is 0, it finishes dQ (differentiable() in score.cuh).
void logit_scale_rows(const AttentionCall& call, const Rows& dq, float* rows, cudaStream_t stream);
/// dlogit_scale[h]: the sum of these rows over entries and queries.
void logit_scale_gradient(const AttentionCall& call, const float* rows, cudaStream_t stream);

/// dmask: dS is recomputed for each element of the mask and summed over the dims along which the mask was
/// broadcast.
void mask_gradient(const AttentionCall& call, const RowStates& states, const float* row_sums,
                   const Context& context);

/// Writes rows of packed tensors that no sequence owns, and those past the longest sequence: O = 0, LSE =
/// −inf.
void clear_unused_outputs(const AttentionCall& call, cudaStream_t stream);

/// Clears the gradients of such rows and of keys past an entry's length.
void clear_unused_gradients(const AttentionCall& call, cudaStream_t stream);

}  // namespace tilewise::cuda::simt
