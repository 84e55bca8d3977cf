// The part of backward that every gradient needs: the weights of a panel, recomputed from q and k as a
// softmax of their own, and the gradients of its scores.

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

/// What is known of a query once all its scores are; [Hq, rows_q] each. In f64, to be rounded
/// once.
struct RowStatistics {
  float* maximum;     // of its scores and its sink: p_j = exp(s_j − maximum)·inverse
  double* inverse;    // 1 / Σ exp(s − maximum), over the keys and the sink; 0 where it sees nothing
  double* shift;      // d_lse − delta
  double* gradients;  // Σ_j p_j·(dp_j + shift), over the keys of this call
  double* logit;      // what the row gives to the gradient of its head's logit scale; may be null

  RowStatistics operator+(std::int64_t rows) const {
    return {maximum + rows, inverse + rows, shift + rows, gradients + rows, logit + rows};
  }
};

/// What a worker recomputes scores in. A strip has a row for each of `keys` keys.
struct GradientScratch {
  Panel* panel;
  std::int32_t* block_states;
  float* q;        // [D, width]: transposed and scaled
  float* d_o;      // [Dv, width]: transposed
  float* maximum;  // [width], as in RowStatistics
  float* inverse;  // [width], likewise
  float* shift;    // [width], likewise
  float* weights;  // [keys, width]
  float* dscores;  // [keys, width]
  float* k_rows;   // [tile keys, D]: keys that cannot be read where they lie
  float* v_rows;   // [tile keys, Dv]
  ScoreScratch score;
};

/// `keys` is the length of a strip, `tile` that of a tile.
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
          .inverse = arena.take<float>(width),
          .shift = arena.take<float>(width),
          .weights = arena.take<float>(keys * width),
          .dscores = arena.take<float>(keys * width),
          .k_rows = arena.take<float>(converts ? tile * problem.dim_qk : 0),
          .v_rows = arena.take<float>(converts ? tile * problem.dim_v : 0),
          .score = {.bias = arena.take<float>(std::int64_t{tile} * width),
                    .staging = arena.take<float>(staging_floats(widest, tile)),
                    .tangents = arena.take<float>(problem.features.softcap ? keys * width : 0)}};
}

inline bool fill_panel(const AttentionCall& call, const PanelGrid& grid, std::int64_t b, std::int64_t head,
                       std::int64_t index, const GradientScratch& scratch) {
  const bool blocks = call.problem.features.block_mask;
  const std::span states(scratch.block_states, static_cast<std::size_t>(blocks ? call.key_blocks() : 0));
  return grid.fill(*scratch.panel, b, head, index, lanes, states);
}

/// Brings the panel's rows of q and d_o in.
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

/// What the sink adds to the sum of a row's weights.
inline double sink_weight(const AttentionCall& call, std::int64_t b, std::int64_t head, float maximum) {
  if (!call.problem.features.sinks) return 0;
  return std::exp(call.sinks.at(b, head) - static_cast<double>(maximum));
}

/// The panel's maximum, inverse and shift.
inline void load_statistics(const AttentionCall& call, const Panel& panel, const RowStatistics& rows,
                            const GradientScratch& scratch) {
  for (int lane = 0; lane < panel.width; ++lane) {
    const std::int64_t row = panel.head[lane] * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane];
    scratch.maximum[lane] = rows.maximum[row];
    scratch.inverse[lane] = static_cast<float>(rows.inverse[row]);
    scratch.shift[lane] = static_cast<float>(rows.shift[row]);
  }
}

/// The scores of a tile; gives its keys.
inline RowBlock gradient_scores(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                                float* scores, float* tangents, const GradientScratch& scratch) {
  const auto dim = static_cast<int>(call.problem.dim_qk);
  const RowBlock k = load_key_rows(call, panel, call.k, tile, dim, scratch.k_rows);
  multiply_deep({.a = k.data,
                 .lda = k.stride,
                 .b = scratch.q,
                 .ldb = panel.width,
                 .c = scores,
                 .ldc = panel.width,
                 .depth = dim},
                tile.count, panel.width, panel.sequence.length_q);
  ScoreScratch score = scratch.score;
  score.tangents = tangents;
  score_tile(call, panel, tile, scores, score);
  return k;
}

/// dp = dropout's factor · d_o·v of a tile. With dropout the factors stay in the bias tile.
inline void gradient_weights(const AttentionCall& call, const Panel& panel, const KeyTile& tile, float* dp,
                             const GradientScratch& scratch) {
  const auto dim = static_cast<int>(call.problem.dim_v);
  const int width = panel.width;
  const RowBlock v = load_key_rows(call, panel, call.v, tile, dim, scratch.v_rows);
  multiply_deep(
      {.a = v.data, .lda = v.stride, .b = scratch.d_o, .ldb = width, .c = dp, .ldc = width, .depth = dim},
      tile.count, width, panel.sequence.length_q);
  if (!call.problem.features.dropout) return;
  for_each_dropout_factor(call, panel, tile, [&](int j, int lane, VF factor) HWY_ATTR {
    float* at = dp + j * width + lane;
    store(factor, scratch.score.bias + j * width + lane);
    store(hn::Mul(load(at), factor), at);
  });
}

/// Where a tile begins in a strip.
inline std::int64_t strip_offset(const Panel& panel, const KeyTile& tile) {
  return (tile.first - panel.any.first) * panel.width;
}
inline float* strip_tangents(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                             const GradientScratch& scratch) {
  return call.problem.features.softcap ? scratch.score.tangents + strip_offset(panel, tile) : nullptr;
}

/// high += x, and low += what rounding takes from that (Knuth's TwoSum): a long sum, without its errors.
HWY_INLINE void add_exactly(VF x, VF& high, VF& low) {
  const VF sum = hn::Add(high, x);
  const VF taken = hn::Sub(sum, high);
  low = hn::Add(low, hn::Add(hn::Sub(high, hn::Sub(sum, taken)), hn::Sub(x, taken)));
  high = sum;
}
HWY_INLINE void add_exactly(VF x, float* high, float* low) {
  VF sum = load(high);
  VF rest = load(low);
  add_exactly(x, sum, rest);
  store(sum, high);
  store(rest, low);
}

/// Such a sum a lane.
struct LaneSums {
  alignas(64) float high[max_panel_width] = {};
  alignas(64) float low[max_panel_width] = {};
  double at(int lane) const { return static_cast<double>(high[lane]) + static_cast<double>(low[lane]); }
  HWY_INLINE void add(VF x, int lane) { add_exactly(x, high + lane, low + lane); }
};

/// From scores and dp of a tile: exp(s − maximum) in place of s, negative where dropout hides the key, and
/// their sums, added to those of the tiles before. That of p·dp loses nothing: equal keys, whose dp are
/// equal, must give that very number.
inline void weigh_tile(const AttentionCall& call, int keys, int width, float* weights, const float* dp,
                       const GradientScratch& scratch, LaneSums& sum, LaneSums& delta) {
  const bool dropout = call.problem.features.dropout;
  for (int lane = 0; lane < width; lane += lanes) {
    const VF maximum = load(scratch.maximum + lane);
    VF tile_sum[4] = {hn::Zero(F()), hn::Zero(F()), hn::Zero(F()), hn::Zero(F())};
    VF tile_delta[2] = {hn::Zero(F()), hn::Zero(F())};
    VF tile_rest[2] = {hn::Zero(F()), hn::Zero(F())};
    in_fours(keys, [&](int j, int part) HWY_ATTR {
      const int at = j * width + lane;
      const VF weight = exp_of(hn::Sub(load(weights + at), maximum));
      tile_sum[part] = hn::Add(tile_sum[part], weight);
      add_exactly(hn::Mul(weight, load(dp + at)), tile_delta[part % 2], tile_rest[part % 2]);
      if (dropout) {
        const auto dropped = hn::Eq(load(scratch.score.bias + at), hn::Zero(F()));
        store(hn::IfThenElse(dropped, hn::Neg(weight), weight), weights + at);
      } else {
        store(weight, weights + at);
      }
    });
    for (int part = 0; part < 4; ++part) sum.add(tile_sum[part], lane);
    for (int part = 0; part < 2; ++part) {
      delta.add(tile_delta[part], lane);
      delta.add(tile_rest[part], lane);
    }
  }
}

/// Σ_j exp(s_j − maximum) and Σ_j exp(s_j − maximum)·dp_j of a row.
struct RowSums {
  double weights;
  double gradients;
};

/// What a row's statistics are where the call has all of its keys. delta is made as the sum of p·dp, not as
/// d_o·o, which is the same number: where a few keys have all the weight, gradients are small differences
/// dp − delta, and only this delta has the roundings that dp has.
inline void write_statistics(const RowStatistics& row, float maximum, const RowSums& sums, double sink,
                             double d_lse) {
  const double total = sums.weights + sink;
  const double delta = total == 0 ? 0 : sums.gradients / total;
  *row.maximum = maximum;
  *row.inverse = total == 0 ? 0 : 1 / total;
  *row.shift = d_lse - delta;
  // Σ_j p_j·(dp_j − delta + d_lse): what of it is nothing is not computed.
  *row.gradients = sums.weights == 0 ? 0 : (sums.weights * d_lse + sink * delta) / total;
}

/// And where it has a share of them, lse and delta being known.
inline void write_share(const RowStatistics& row, float maximum, double lse, const RowSums& sums,
                        double shift) {
  const bool unseen = lse == static_cast<double>(minus_infinity);
  *row.maximum = maximum;
  *row.inverse = unseen ? 0 : std::exp(static_cast<double>(maximum) - lse);
  *row.shift = shift;
  *row.gradients = *row.inverse * (sums.gradients + shift * sums.weights);
}

/// Where a lane's maximum starts: at its sink, or at the lse of a row that saw other keys too, above which no
/// score is. Beside the highest number all weights are 0: those of a row that saw nothing.
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

/// The softmax of all that a panel sees, in two sweeps over the keys: the scores, then what weigh_tile makes
/// of them.
inline void weigh_panel(const AttentionCall& call, const Panel& panel, int tile_keys,
                        const GradientScratch& scratch, const RowStatistics& rows) {
  const int width = panel.width;
  const bool share = call.delta.wanted;
  LaneSums sum;
  LaneSums delta;
  for (int lane = 0; lane < width; ++lane) scratch.maximum[lane] = first_maximum(call, panel, lane);
  for_each_key_tile(call, panel, panel.any, tile_keys, [&](const KeyTile& tile) {
    float* scores = scratch.weights + strip_offset(panel, tile);
    gradient_scores(call, panel, tile, scores, strip_tangents(call, panel, tile, scratch), scratch);
    if (share) return;  // the maximum is known
    for (int lane = 0; lane < width; lane += lanes) {
      const VF before = load(scratch.maximum + lane);
      store(highest_score(scores + lane, tile.count, width, before), scratch.maximum + lane);
    }
  });
  for_each_key_tile(call, panel, panel.any, tile_keys, [&](const KeyTile& tile) {
    float* dp = scratch.dscores + strip_offset(panel, tile);
    gradient_weights(call, panel, tile, dp, scratch);
    weigh_tile(call, tile.count, width, scratch.weights + strip_offset(panel, tile), dp, scratch, sum, delta);
  });
  for (int lane = 0; lane < panel.rows; ++lane) {
    const std::int64_t head = panel.head[lane];
    const std::int64_t at = panel.sequence.first_q + panel.query[lane];
    const RowStatistics row = rows + (head * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane]);
    const RowSums sums{.weights = sum.at(lane), .gradients = delta.at(lane)};
    const double d_lse = statistic(call.d_lse, panel.b, head, at);
    if (share) {
      write_share(row, scratch.maximum[lane], statistic(call.lse, panel.b, head, at), sums,
                  d_lse - statistic(call.delta, panel.b, head, at));
    } else {
      write_statistics(row, scratch.maximum[lane], sums,
                       sink_weight(call, panel.b, head, scratch.maximum[lane]), d_lse);
    }
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
