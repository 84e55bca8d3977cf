#pragma once

#include "attention/call.h"
#include "core/arena.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// `naive` and `tiled`, the kernels that keep S in memory. They take the dense layout without block masks.

void naive_forward(const AttentionCall& call, const Context& context);
void naive_backward(const AttentionCall& call, const Context& context);
void tiled_forward(const AttentionCall& call, const Context& context);
void tiled_backward(const AttentionCall& call, const Context& context);

/// The workspace of both kernels. Each matrix is [B, Hq, Sq, Sk] and contiguous.
struct ForwardScratch {
  float* s;  ///< S, then P

  ForwardScratch(Arena& arena, const AttentionCall& call) : s(take_matrix(arena, call)) {}

  static constexpr std::int64_t matrix_size(const AttentionCall& call) {
    return call.problem.heads_q * call.rows_q() * call.problem.length_k;
  }
  static float* take_matrix(Arena& arena, const AttentionCall& call) {
    return arena.take<float>(call.problem.heads_q * call.rows_q(), call.problem.length_k);
  }
};

struct BackwardScratch {
  float* sink_terms;  ///< [B, Hq, Sq]: each row's term of dsinks
  float* row_sums;    ///< [B, Hq, Sq]: dS summed over keys
  float* p;           ///< q·k, then P after dropout
  float* ds;          ///< dP, then dS, which dmask is summed from
  float* dqk;         ///< the gradient of scale·q·k: dS, unless there is a softcap

  BackwardScratch(Arena& arena, const AttentionCall& call)
      : sink_terms(arena.take<float>(call.problem.heads_q * call.rows_q())),
        row_sums(arena.take<float>(call.problem.heads_q * call.rows_q())),
        p(ForwardScratch::take_matrix(arena, call)),
        ds(ForwardScratch::take_matrix(arena, call)),
        dqk(ds) {
    // dS and dqk differ only with a softcap, and only dmask needs dS. Otherwise one matrix serves as both.
    const AttentionFeatures& features = call.problem.features;
    if (features.softcap && features.mask_gradient) dqk = ForwardScratch::take_matrix(arena, call);
  }
};

/// Bytes of workspace, for either kernel.
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
