#pragma once

#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/common/f32/split_rows.h"

namespace tilewise::cuda::mma_f32 {

/// Weights are multiplied by two to this before they are split: what f16 loses of low ones is then 2^-39
/// of 1.
inline constexpr int weight_bits = 14;

/// What backward knows of a query before it meets a key, [Hq, rows_q] each: its weights are
/// exp2(score·log2 e − top) · factor, and the gradient of a score is weight·(d_o·v + shift).
struct RowValues {
  float* top = nullptr;     ///< lse·log2 e less a small number; infinite for a query that saw nothing
  float* factor = nullptr;  ///< two to that number and to what rounding took, times the weights' scale
  float* shift = nullptr;   ///< d_lse − d_o·o
};

/// The workspace of a backward call.
struct BackwardSpace {
  SplitRows q, k, v, d_o;
  RowValues rows;
  simt::Peaks peaks;
  Unfit unfit;
  std::size_t bytes = 0;

  BackwardSpace(const AttentionCall& call, void* base, int rows_a_tile, int parts, int dim) {
    Arena arena(base);
    q = SplitRows(arena, call, Side::queries, rows_a_tile, parts, dim);
    d_o = SplitRows(arena, call, Side::queries, rows_a_tile, parts, dim);
    k = SplitRows(arena, call, Side::keys, rows_a_tile, parts, dim);
    v = SplitRows(arena, call, Side::keys, rows_a_tile, parts, dim);
    const std::int64_t count = call.problem.heads_q * call.rows_q();
    rows = {arena.take<float>(count), arena.take<float>(count), arena.take<float>(count)};
    peaks = simt::Peaks(arena, count);
    unfit = Unfit(arena, call);
    bytes = arena.used();
  }
};

}  // namespace tilewise::cuda::mma_f32
