#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::widened {

// Copies of a 16-bit call in f32, in its workspace: what it reads, and what the f32 kernels write.

struct Copies {
  /// Of backward it gives o and lse in f32, which those of the caller are not exact enough for.
  AttentionCall forward;
  AttentionCall backward;  ///< where that is asked
  std::size_t bytes = 0;   ///< a multiple of the workspace's alignment

  Copies(const AttentionCall& call, void* space);
};

/// The problem that the f32 kernels are asked.
AttentionProblem problem_in_f32(const AttentionProblem& problem, Pass pass);

/// q, k, v and, for backward, d_o to f32.
void widen_inputs(const AttentionCall& call, const Copies& copies, const Context& context);
/// o, or dq, dk and dv, from f32 to what the call asks for.
void round_results(const AttentionCall& call, const Copies& copies, const Context& context);

}  // namespace tilewise::cuda::widened
