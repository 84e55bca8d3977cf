#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::widened {

// The tensors of a 16-bit call as f32, in the call's workspace: copies of the inputs, and memory for the
// results of the f32 kernels.

struct Copies {
  /// For a backward call, it computes O and LSE in f32: those of the caller are not exact enough.
  AttentionCall forward;
  AttentionCall backward;  ///< set for a backward call
  std::size_t bytes = 0;   ///< a multiple of the workspace's alignment

  Copies(const AttentionCall& call, void* space);
};

/// The problem of the f32 call.
AttentionProblem problem_in_f32(const AttentionProblem& problem, Pass pass);

/// Copies Q, K, V and, for backward, dO to f32.
void widen_inputs(const AttentionCall& call, const Copies& copies, const Context& context);
/// Rounds O, or dQ, dK and dV, from f32 to the types of the call.
void round_results(const AttentionCall& call, const Copies& copies, const Context& context);

}  // namespace tilewise::cuda::widened
