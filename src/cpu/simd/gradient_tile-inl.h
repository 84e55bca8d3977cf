// The part of backward that every gradient needs: weights and score gradients of a panel by a tile of keys,
// recomputed from q, k, v, d_o and the statistics.

#if defined(TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#undef TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#else
#define TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#endif

#include "core/arena.h"
#include "cpu/simd/dropout-inl.h"
#include "cpu/simd/multiply-inl.h"
#include "cpu/simd/panel.h"
#include "cpu/simd/score-inl.h"
#include "cpu/simd/tuning.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// What a worker recomputes a tile in.
struct GradientScratch {
  Panel* panel;
  std::int32_t* block_states;
  float* q;        // [D, width]: transposed and scaled
  float* d_o;      // [Dv, width]: transposed
  float* lse;      // [width]; +inf for a row that sees nothing, whose weights are then 0
  float* shift;    // [width]: d_lse − Σ_d d_o·o
  float* weights;  // [tile keys, width], after dropout
  float* dscores;  // [tile keys, width]
  float* k_rows;   // [tile keys, D]: keys that cannot be read where they lie
  float* v_rows;   // [tile keys, Dv]
  ScoreScratch score;
};

inline GradientScratch take_gradient_scratch(Arena& arena, const AttentionCall& call, int width, int keys) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t tile = std::int64_t{keys} * width;
  const std::int64_t widest = std::max({problem.dim_qk, problem.dim_v, std::int64_t{keys}});
  const bool converts = problem.dtype != DType::f32;
  return {.panel = arena.take<Panel>(1),
          .block_states = arena.take<std::int32_t>(problem.features.block_mask ? call.key_blocks() : 0),
          .q = arena.take<float>(problem.dim_qk * width),
          .d_o = arena.take<float>(problem.dim_v * width),
          .lse = arena.take<float>(width),
          .shift = arena.take<float>(width),
          .weights = arena.take<float>(tile),
          .dscores = arena.take<float>(tile),
          .k_rows = arena.take<float>(converts ? keys * problem.dim_qk : 0),
          .v_rows = arena.take<float>(converts ? keys * problem.dim_v : 0),
          .score = {.bias = arena.take<float>(tile),
                    .staging = arena.take<float>(staging_floats(widest, keys)),
                    .tangents = arena.take<float>(problem.features.softcap ? tile : 0)}};
}

inline bool fill_panel(const AttentionCall& call, const PanelGrid& grid, std::int64_t b, std::int64_t head,
                       std::int64_t index, const GradientScratch& scratch) {
  const bool blocks = call.problem.features.block_mask;
  const std::span states(scratch.block_states, static_cast<std::size_t>(blocks ? call.key_blocks() : 0));
  return grid.fill(*scratch.panel, b, head, index, lanes, states);
}

/// Σ_d a[d]·b[d] of two rows of one type.
inline float dot_rows(const std::byte* a, const std::byte* b, DType dtype, int dim, float* staging) {
  float* wide_a = staging;
  float* wide_b = staging + dim;
  widen(wide_a, a, dtype, dim, 1.0f);
  widen(wide_b, b, dtype, dim, 1.0f);
  VF sum = hn::Zero(F());
  int d = 0;
  for (; d + lanes <= dim; d += lanes) sum = hn::MulAdd(load(wide_a + d), load(wide_b + d), sum);
  float total = hn::GetLane(hn::SumOfLanes(F(), sum));
  for (; d < dim; ++d) total += wide_a[d] * wide_b[d];
  return total;
}

/// shift of every query of (b, head): what all score gradients of a row have in common.
inline void row_shifts(const AttentionCall& call, std::int64_t b, std::int64_t head, float* staging,
                       float* shifts) {
  const Sequence sequence = call.sequence(b);
  for (std::int64_t i = 0; i < sequence.length_q; ++i) {
    const std::int64_t row = sequence.first_q + i;
    const float delta = dot_rows(call.o.at(b, head, row), call.d_o.at(b, head, row), call.o.dtype,
                                 static_cast<int>(call.problem.dim_v), staging);
    const float d_lse =
        call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(b, head, row)) : 0.0f;
    shifts[i] = d_lse - delta;
  }
}

/// Brings the panel's rows in; `shifts` is [Hq, rows_q].
inline void load_panel(const AttentionCall& call, const Panel& panel, const float* shifts,
                       const GradientScratch& scratch) {
  const auto row_of = [&](const Rows& rows) {
    return [&](int lane) {
      return rows.at(panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]);
    };
  };
  rows_to_panel(scratch.q, panel.width, static_cast<int>(call.problem.dim_qk), call.q.dtype,
                query_factor(call), scratch.score.staging, row_of(call.q));
  rows_to_panel(scratch.d_o, panel.width, static_cast<int>(call.problem.dim_v), call.d_o.dtype, 1.0f,
                scratch.score.staging, row_of(call.d_o));
  for (int lane = 0; lane < panel.width; ++lane) {
    const float lse = *reinterpret_cast<const float*>(row_of(call.lse)(lane));
    scratch.lse[lane] = lse == minus_infinity ? -minus_infinity : lse;
    scratch.shift[lane] =
        shifts[panel.head[lane] * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane]];
  }
}

/// Where a tile's keys and values were found.
struct TileRows {
  RowBlock k, v;
};

/// Fills scratch.weights, and scratch.dscores when `with_scores`, for one tile.
inline TileRows gradient_tile(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                              bool with_scores, const GradientScratch& scratch) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  const int width = panel.width;
  const TileRows rows = {.k = load_key_rows(call, panel, call.k, tile, dim_qk, scratch.k_rows),
                         .v = load_key_rows(call, panel, call.v, tile, dim_v, scratch.v_rows)};
  multiply_deep({.a = rows.k.data,
                 .lda = rows.k.stride,
                 .b = scratch.q,
                 .ldb = width,
                 .c = scratch.weights,
                 .ldc = width,
                 .depth = dim_qk},
                tile.count, width);
  score_tile(call, panel, tile, scratch.weights, scratch.score);
  if (with_scores) {
    multiply_deep({.a = rows.v.data,
                   .lda = rows.v.stride,
                   .b = scratch.d_o,
                   .ldb = width,
                   .c = scratch.dscores,
                   .ldc = width,
                   .depth = dim_v},
                  tile.count, width);
  }
  const bool dropout = call.problem.features.dropout;
  if (dropout) {  // the factors wait in the bias tile, which is free again
    for_each_dropout_factor(call, panel, tile, [&](int j, int lane, VF factor) HWY_ATTR {
      store(factor, scratch.score.bias + j * width + lane);
    });
  }
  map_tile(scratch.weights, tile.count, width, [&](int j, int lane, VF s) HWY_ATTR {
    const VF weight = exp_of(hn::Sub(s, load(scratch.lse + lane)));
    const VF factor = dropout ? load(scratch.score.bias + j * width + lane) : set(1.0f);
    if (with_scores) {
      float* dscore = scratch.dscores + j * width + lane;
      store(hn::Mul(weight, hn::MulAdd(load(dscore), factor, load(scratch.shift + lane))), dscore);
    }
    return hn::Mul(weight, factor);
  });
  return rows;
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
