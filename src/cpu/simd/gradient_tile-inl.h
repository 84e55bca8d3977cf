// What every gradient of the backward pass needs: P of a panel of queries, recomputed from Q and K with its
// own softmax, and dS.

#if defined(TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#undef TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#else
#define TILEWISE_CPU_SIMD_GRADIENT_TILE_INL_H
#endif

#include <cmath>

#include "core/arena.h"
#include "core/load.h"
#include "cpu/simd/dropout-inl.h"
#include "cpu/simd/multiply-inl.h"
#include "cpu/simd/panel.h"
#include "cpu/simd/score-inl.h"
#include "cpu/simd/softmax-inl.h"
#include "cpu/simd/tuning.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// The statistics of each query, known once all its scores are. Each array is [Hq, rows_q]. Most are f64, so
/// that they are rounded once.
struct RowStatistics {
  float* maximum;            // of the scores and the sink: p_j = exp(s_j − maximum)·inverse_sum
  double* inverse_sum;       // 1 / Σ exp(s − maximum) over the keys and the sink; 0 for an empty row
  double* dlse_minus_delta;  // dLSE − delta, so that dS = P·(dP + dlse_minus_delta)
  double* ds_sum;            // Σ_j dS_j over the keys of this call
  double* dlogit_scale;      // the row's term of the gradient of its head's logit scale; may be null

  RowStatistics operator+(std::int64_t rows) const {
    return {maximum + rows, inverse_sum + rows, dlse_minus_delta + rows, ds_sum + rows, dlogit_scale + rows};
  }
};

/// The buffers in which a worker recomputes scores. A strip is the part of a score matrix that belongs to one
/// panel: one row per key that the panel may see, one column per query.
struct GradientScratch {
  Panel* panel;
  std::int32_t* block_states;
  float* q;                 // [D, width]: transposed and multiplied by the scale
  float* d_o;               // [Dv, width]: transposed
  float* maximum;           // [width], as in RowStatistics
  float* inverse_sum;       // [width], likewise
  float* dlse_minus_delta;  // [width], likewise
  float* p;                 // strip [keys, width]: S, then exp(S − maximum), then P after dropout
  float* ds;                // strip [keys, width]: dP, then dS
  float* k_rows;            // [tile keys, D]: rows of K converted to f32; unused where K is f32
  float* v_rows;            // [tile keys, Dv]: likewise for V
  ScoreScratch score;
};

/// `keys` is the number of keys in a strip, `tile` the number in a tile.
inline GradientScratch take_gradient_scratch(Arena& arena, const AttentionCall& call, int width,
                                             std::int64_t keys, int tile) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t widest = std::max({problem.dim_qk, problem.dim_v, std::int64_t{tile}});
  const bool converts = problem.dtype != DType::f32;
  return {.panel = arena.take<Panel>(1),
          .block_states = arena.take<std::int32_t>(problem.features.block_mask ? call.key_blocks() : 0),
          .q = arena.take<float>(problem.dim_qk * width),
          .d_o = arena.take<float>(problem.dim_v * width),
          .maximum = arena.take<float>(width),
          .inverse_sum = arena.take<float>(width),
          .dlse_minus_delta = arena.take<float>(width),
          .p = arena.take<float>(keys * width),
          .ds = arena.take<float>(keys * width),
          .k_rows = arena.take<float>(converts ? tile * problem.dim_qk : 0),
          .v_rows = arena.take<float>(converts ? tile * problem.dim_v : 0),
          .score = {.bias = arena.take<float>(std::int64_t{tile} * width),
                    .staging = arena.take<float>(staging_floats(widest, tile)),
                    .tanh_values = arena.take<float>(problem.features.softcap ? keys * width : 0)}};
}

inline bool fill_panel(const AttentionCall& call, const PanelGrid& grid, std::int64_t b, std::int64_t head,
                       std::int64_t index, const GradientScratch& scratch) {
  const bool blocks = call.problem.features.block_mask;
  const std::span states(scratch.block_states, static_cast<std::size_t>(blocks ? call.key_blocks() : 0));
  return grid.fill(*scratch.panel, b, head, index, lanes, states);
}

/// Loads the panel's rows of Q and dO, transposed.
inline void load_panel(const AttentionCall& call, const Panel& panel, const GradientScratch& scratch) {
  const auto row_of = [&](const Rows& rows) {
    return [&](int lane) {
      return rows.at(panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]);
    };
  };
  rows_to_panel(scratch.q, panel.width, static_cast<int>(call.problem.dim_qk), call.q.dtype,
                static_cast<float>(call.scale), scratch.score.staging, row_of(call.q));
  scale_by_head(call, panel, static_cast<int>(call.problem.dim_qk), scratch.q);
  rows_to_panel(scratch.d_o, panel.width, static_cast<int>(call.problem.dim_v), call.d_o.dtype, 1.0f,
                scratch.score.staging, row_of(call.d_o));
}

inline double statistic(const Rows& rows, std::int64_t b, std::int64_t head, std::int64_t row) {
  return rows.wanted ? load_element(rows.at(b, head, row), rows.dtype, 0) : 0.0;
}

/// exp(sink − maximum), the sink's term of the softmax's denominator; 0 without a sink.
inline double exp_of_sink(const AttentionCall& call, std::int64_t b, std::int64_t head, float maximum) {
  if (!call.problem.features.sinks) return 0;
  return std::exp(call.sinks.at(b, head) - static_cast<double>(maximum));
}

/// Copies maximum, inverse_sum and dlse_minus_delta of the panel's rows into the scratch.
inline void load_statistics(const AttentionCall& call, const Panel& panel, const RowStatistics& rows,
                            const GradientScratch& scratch) {
  for (int lane = 0; lane < panel.width; ++lane) {
    const std::int64_t row = panel.head[lane] * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane];
    scratch.maximum[lane] = rows.maximum[row];
    scratch.inverse_sum[lane] = static_cast<float>(rows.inverse_sum[row]);
    scratch.dlse_minus_delta[lane] = static_cast<float>(rows.dlse_minus_delta[row]);
  }
}

/// Recomputes the scores of a tile. Returns the tile's rows of K.
inline RowBlock recompute_scores(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                                 float* scores, float* tanh_values, const GradientScratch& scratch) {
  const auto dim = static_cast<int>(call.problem.dim_qk);
  const RowBlock k = load_key_rows(call, panel, call.k, tile, dim, scratch.k_rows);
  multiply_in_chunks({.a = k.data,
                      .lda = k.stride,
                      .b = scratch.q,
                      .ldb = panel.width,
                      .c = scores,
                      .ldc = panel.width,
                      .depth = dim},
                     tile.count, panel.width, panel.sequence.length_q);
  ScoreScratch score = scratch.score;
  score.tanh_values = tanh_values;
  score_tile(call, panel, tile, scores, score);
  return k;
}

/// dP = dO·Vᵀ of a tile, times the dropout factors, which are left in the bias tile.
inline void compute_dp(const AttentionCall& call, const Panel& panel, const KeyTile& tile, float* dp,
                       const GradientScratch& scratch) {
  const auto dim = static_cast<int>(call.problem.dim_v);
  const int width = panel.width;
  const RowBlock v = load_key_rows(call, panel, call.v, tile, dim, scratch.v_rows);
  multiply_in_chunks(
      {.a = v.data, .lda = v.stride, .b = scratch.d_o, .ldb = width, .c = dp, .ldc = width, .depth = dim},
      tile.count, width, panel.sequence.length_q);
  if (!call.problem.features.dropout) return;
  for_each_dropout_factor(call, panel, tile, [&](int j, int lane, VF factor) HWY_ATTR {
    float* at = dp + j * width + lane;
    store(factor, scratch.score.bias + j * width + lane);
    store(hn::Mul(load(at), factor), at);
  });
}

/// The offset of a tile in a strip.
inline std::int64_t strip_offset(const Panel& panel, const KeyTile& tile) {
  return (tile.first - panel.any.first) * panel.width;
}
inline float* strip_tanh_values(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                                const GradientScratch& scratch) {
  return call.problem.features.softcap ? scratch.score.tanh_values + strip_offset(panel, tile) : nullptr;
}

/// Compensated summation: high += x, and low += the rounding error of that addition (Knuth's TwoSum).
HWY_INLINE void add_compensated(VF x, VF& high, VF& low) {
  const VF sum = hn::Add(high, x);
  const VF added = hn::Sub(sum, high);
  low = hn::Add(low, hn::Add(hn::Sub(high, hn::Sub(sum, added)), hn::Sub(x, added)));
  high = sum;
}
HWY_INLINE void add_compensated(VF x, float* high, float* low) {
  VF sum = load(high);
  VF error = load(low);
  add_compensated(x, sum, error);
  store(sum, high);
  store(error, low);
}

/// One compensated sum per lane.
struct CompensatedSums {
  alignas(64) float high[max_panel_width] = {};
  alignas(64) float low[max_panel_width] = {};
  double at(int lane) const { return static_cast<double>(high[lane]) + static_cast<double>(low[lane]); }
  HWY_INLINE void add(VF x, int lane) { add_compensated(x, high + lane, low + lane); }
};

/// Replaces the scores of a tile by exp(s − maximum), with a negative sign where dropout drops the key. Adds
/// Σ exp(s − maximum) to `sum` and Σ exp(s − maximum)·dp to `delta`. The products exp·dp are summed with
/// compensation: when all keys are equal, their dp are equal, and delta must come out as that same number.
inline void exponentiate_tile(const AttentionCall& call, int keys, int width, float* p, const float* dp,
                              const GradientScratch& scratch, CompensatedSums& sum, CompensatedSums& delta) {
  const bool dropout = call.problem.features.dropout;
  for (int lane = 0; lane < width; lane += lanes) {
    const VF maximum = load(scratch.maximum + lane);
    VF tile_sum[4] = {hn::Zero(F()), hn::Zero(F()), hn::Zero(F()), hn::Zero(F())};
    VF tile_delta[2] = {hn::Zero(F()), hn::Zero(F())};
    VF tile_error[2] = {hn::Zero(F()), hn::Zero(F())};
    for_each_of_four(keys, [&](int j, int part) HWY_ATTR {
      const int at = j * width + lane;
      const VF exp_s = exp_of(hn::Sub(load(p + at), maximum));
      tile_sum[part] = hn::Add(tile_sum[part], exp_s);
      add_compensated(hn::Mul(exp_s, load(dp + at)), tile_delta[part % 2], tile_error[part % 2]);
      if (dropout) {
        const auto dropped = hn::Eq(load(scratch.score.bias + at), hn::Zero(F()));
        store(hn::IfThenElse(dropped, hn::Neg(exp_s), exp_s), p + at);
      } else {
        store(exp_s, p + at);
      }
    });
    for (int part = 0; part < 4; ++part) sum.add(tile_sum[part], lane);
    for (int part = 0; part < 2; ++part) {
      delta.add(tile_delta[part], lane);
      delta.add(tile_error[part], lane);
    }
  }
}

/// Σ_j exp(s_j − maximum) and Σ_j exp(s_j − maximum)·dp_j of a row.
struct ExpSums {
  double exp;
  double exp_dp;
};

/// Writes the statistics of a row whose keys are all in this call. delta is computed as Σ p·dp and not as
/// dO·O, although both are the same number: where a few keys have nearly all the weight, dS is a small
/// difference dp − delta, and only this delta has the same rounding errors as dp.
inline void write_statistics(const RowStatistics& row, float maximum, const ExpSums& sums, double sink,
                             double d_lse) {
  const double total = sums.exp + sink;
  const double delta = total == 0 ? 0 : sums.exp_dp / total;
  *row.maximum = maximum;
  *row.inverse_sum = total == 0 ? 0 : 1 / total;
  *row.dlse_minus_delta = d_lse - delta;
  // Σ_j p_j·(dp_j − delta + d_lse), without the terms that cancel: Σ_j p_j·dp_j is delta, and Σ_j p_j is 1
  // minus the sink's share.
  *row.ds_sum = sums.exp == 0 ? 0 : (sums.exp * d_lse + sink * delta) / total;
}

/// The same for a piece: the call has some of the row's keys, and LSE and delta of the whole row are known.
inline void write_piece_statistics(const RowStatistics& row, float maximum, double lse, const ExpSums& sums,
                                   double dlse_minus_delta) {
  const bool empty = lse == static_cast<double>(minus_infinity);
  *row.maximum = maximum;
  *row.inverse_sum = empty ? 0 : std::exp(static_cast<double>(maximum) - lse);
  *row.dlse_minus_delta = dlse_minus_delta;
  *row.ds_sum = *row.inverse_sum * (sums.exp_dp + dlse_minus_delta * sums.exp);
}

/// The value from which a lane's running maximum starts: its sink, or, for a piece, the LSE of the whole row,
/// which no score exceeds. An empty row of a piece starts from the highest finite number, which makes all its
/// P 0.
inline float first_maximum(const AttentionCall& call, const Panel& panel, int lane) {
  constexpr float highest = std::numeric_limits<float>::max();
  if (call.delta.wanted) {
    const double lse =
        statistic(call.lse, panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]);
    return lse == static_cast<double>(minus_infinity) ? highest : static_cast<float>(lse);
  }
  if (!call.problem.features.sinks) return -highest;
  return std::max(-highest, static_cast<float>(call.sinks.at(panel.b, panel.head[lane])));
}

/// The softmax over all keys that a panel sees, in two sweeps over the key tiles. The first computes S and
/// its maximum, the second dP, exp(S − maximum) and their sums. Writes the statistics of the panel's rows.
inline void softmax_of_panel(const AttentionCall& call, const Panel& panel, int tile_keys,
                             const GradientScratch& scratch, const RowStatistics& rows) {
  const int width = panel.width;
  const bool piece = call.delta.wanted;
  CompensatedSums sum;
  CompensatedSums delta;
  for (int lane = 0; lane < width; ++lane) scratch.maximum[lane] = first_maximum(call, panel, lane);
  for_each_key_tile(call, panel, panel.any, tile_keys, [&](const KeyTile& tile) {
    float* scores = scratch.p + strip_offset(panel, tile);
    recompute_scores(call, panel, tile, scores, strip_tanh_values(call, panel, tile, scratch), scratch);
    if (piece) return;  // the maximum is known
    for (int lane = 0; lane < width; lane += lanes) {
      const VF before = load(scratch.maximum + lane);
      store(column_maximum(scores + lane, tile.count, width, before), scratch.maximum + lane);
    }
  });
  for_each_key_tile(call, panel, panel.any, tile_keys, [&](const KeyTile& tile) {
    float* dp = scratch.ds + strip_offset(panel, tile);
    compute_dp(call, panel, tile, dp, scratch);
    exponentiate_tile(call, tile.count, width, scratch.p + strip_offset(panel, tile), dp, scratch, sum,
                      delta);
  });
  for (int lane = 0; lane < panel.rows; ++lane) {
    const std::int64_t head = panel.head[lane];
    const std::int64_t at = panel.sequence.first_q + panel.query[lane];
    const RowStatistics row = rows + (head * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane]);
    const ExpSums sums{.exp = sum.at(lane), .exp_dp = delta.at(lane)};
    const double d_lse = statistic(call.d_lse, panel.b, head, at);
    if (piece) {
      write_piece_statistics(row, scratch.maximum[lane], statistic(call.lse, panel.b, head, at), sums,
                             d_lse - statistic(call.delta, panel.b, head, at));
    } else {
      write_statistics(row, scratch.maximum[lane], sums,
                       exp_of_sink(call, panel.b, head, scratch.maximum[lane]), d_lse);
    }
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
