#pragma once

#include "attention/call.h"
#include "core/arena.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// The two rungs that keep the scores in memory. They take the dense layout without block masks.

void naive_forward(const AttentionCall& call, const Context& context);
void naive_backward(const AttentionCall& call, const Context& context);
void tiled_forward(const AttentionCall& call, const Context& context);
void tiled_backward(const AttentionCall& call, const Context& context);

/// What both keep in the workspace: [B, Hq, Sq, Sk] for each matrix, without gaps.
struct ForwardScratch {
  float* scores;  ///< then weights

  ForwardScratch(Arena& arena, const AttentionCall& call) : scores(take_matrix(arena, call)) {}

  static constexpr std::int64_t matrix_size(const AttentionCall& call) {
    return call.problem.heads_q * call.rows_q() * call.problem.length_k;
  }
  static float* take_matrix(Arena& arena, const AttentionCall& call) {
    return arena.take<float>(call.problem.heads_q * call.rows_q(), call.problem.length_k);
  }
};

struct BackwardScratch {
  float* sink_parts;  ///< [B, Hq, Sq]: what a row gives to dsinks
  float* row_sums;    ///< [B, Hq, Sq]: its score gradients, summed
  float* weights;     ///< q·k, then weights after dropout
  float* dscores;     ///< d_o·v, then gradients of scores, which the mask's is summed from
  float* dproducts;   ///< gradients of scale·q·k: those of scores, unless there is a softcap

  BackwardScratch(Arena& arena, const AttentionCall& call)
      : sink_parts(arena.take<float>(call.problem.heads_q * call.rows_q())),
        row_sums(arena.take<float>(call.problem.heads_q * call.rows_q())),
        weights(ForwardScratch::take_matrix(arena, call)),
        dscores(ForwardScratch::take_matrix(arena, call)),
        dproducts(dscores) {
    // With a softcap and no mask to differentiate, dscores are not kept: one matrix serves.
    const AttentionFeatures& features = call.problem.features;
    if (features.softcap && features.mask_gradient) dproducts = ForwardScratch::take_matrix(arena, call);
  }
};

/// Bytes of workspace, for either rung.
inline std::size_t dense_forward_workspace(const AttentionCall& call) {
  Arena arena(nullptr);
  ForwardScratch(arena, call);
  return arena.used();
}

inline std::size_t dense_backward_workspace(const AttentionCall& call) {
  Arena arena(nullptr);
  BackwardScratch(arena, call);
  return arena.used();
}

}  // namespace tilewise::cuda::simt
