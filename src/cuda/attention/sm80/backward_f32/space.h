#pragma once

#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/common/f32/split_rows.h"

namespace tilewise::cuda::mma_f32 {

/// P is multiplied by 2^p_scale_bits before it is split: then f16 loses at most 2^-39 of a low P.
inline constexpr int p_scale_bits = 14;

/// What backward knows of a query before it meets a key, [Hq, rows_q] each: P = exp2(s·log2 e − lse) · factor
/// / 2^p_scale_bits, and dS = P·(dP + minus_delta).
struct RowValues {
  float* lse = nullptr;          ///< LSE·log2 e less a small integer; infinite for a query that sees no key
  float* factor = nullptr;       ///< corrects P for that integer and for the rounding of `lse`, and scales it
  float* minus_delta = nullptr;  ///< dLSE − delta
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
