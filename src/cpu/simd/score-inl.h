// The score rules, applied to a tile of S between the products Q·Kᵀ and P·V: softcap, ALiBi, masks, band.
// A tile is [keys, width]: one row per key, one lane per query.

#if defined(TILEWISE_CPU_SIMD_SCORE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_SCORE_INL_H
#undef TILEWISE_CPU_SIMD_SCORE_INL_H
#else
#define TILEWISE_CPU_SIMD_SCORE_INL_H
#endif

#include "cpu/simd/panel.h"
#include "cpu/simd/transpose-inl.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// Replaces every vector of the tile by body(key j, first lane, vector).
template <typename Body>
HWY_INLINE void map_tile(float* tile, int keys, int width, const Body& body) {
  for (int lane = 0; lane < width; lane += lanes) {
    for (int j = 0; j < keys; ++j) {
      float* at = tile + j * width + lane;
      store(body(j, lane, load(at)), at);
    }
  }
}

/// The logit scale of a lane's head; 1 if there is none.
inline float logit_scale_of(const AttentionCall& call, const Panel& panel, int lane) {
  if (!call.problem.features.logit_scale) return 1;
  return static_cast<float>(call.logit_scale.at(panel.b, panel.head[lane]));
}
/// Multiplies a transposed panel [dim, width] by the logit scales of its lanes.
inline void scale_by_head(const AttentionCall& call, const Panel& panel, int dim, float* rows) {
  if (!call.problem.features.logit_scale) return;
  alignas(64) float factors[max_panel_width];
  for (int lane = 0; lane < panel.width; ++lane) factors[lane] = logit_scale_of(call, panel, lane);
  map_tile(rows, dim, panel.width,
           [&](int, int lane, VF x) HWY_ATTR { return hn::Mul(x, hn::Load(F(), factors + lane)); });
}

inline void apply_softcap(const AttentionCall& call, int keys, int width, float* tile, float* tanh_values) {
  const VF cap = set(static_cast<float>(call.softcap));
  const VF inverse = set(static_cast<float>(1 / call.softcap));
  map_tile(tile, keys, width, [&](int j, int lane, VF x) HWY_ATTR {
    const VF t = tanh_of(hn::Mul(x, inverse));
    if (tanh_values != nullptr) store(t, tanh_values + j * width + lane);
    return hn::Mul(t, cap);
  });
}

inline void add_alibi(const AttentionCall& call, const Panel& panel, const KeyTile& keys, float* tile) {
  alignas(64) float slopes[max_panel_width];
  alignas(64) std::int32_t positions[max_panel_width];  // distance of queries from the tile's first key
  const auto step = static_cast<std::int32_t>(call.place.step);
  for (int lane = 0; lane < panel.width; ++lane) {
    slopes[lane] = static_cast<float>(call.alibi_slopes.at(panel.b, panel.head[lane]));
    positions[lane] = static_cast<std::int32_t>(call.distance(panel.sequence, panel.query[lane], keys.first));
  }
  map_tile(tile, keys.count, panel.width, [&](int j, int lane, VF s) HWY_ATTR {
    const VI distance = hn::Abs(hn::Sub(hn::Load(I(), positions + lane), hn::Set(I(), j * step)));
    // No fused multiply-add: PyTorch adds a rounded bias, and only with the same rounding do equal keys get
    // the same errors here as there.
    return hn::Sub(s, hn::Mul(hn::Load(F(), slopes + lane), hn::ConvertTo(F(), distance)));
  });
}

/// s + bias. A bias of −inf hides the key even if s is NaN.
HWY_INLINE VF add_bias(VF s, VF bias) {
  return hn::IfThenElse(hn::Eq(bias, set(minus_infinity)), bias, hn::Add(s, bias));
}

/// A contiguous copy in `buffer` of a row with the given stride; the row itself if the stride is 1.
inline const std::byte* contiguous_row(const std::byte* from, std::int64_t stride, DType dtype, int count,
                                       float* buffer) {
  if (stride == 1) return from;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  auto* to = reinterpret_cast<std::byte*>(buffer);
  for (int n = 0; n < count; ++n) std::memcpy(to + n * size, from + n * stride * size, size_of(dtype));
  return to;
}

/// Adds a mask that differs between lanes. row(lane) is the address of the lane's element for the first key
/// of the tile, `stride` the distance between keys. Rows of the mask run along the keys and vectors of the
/// tile along the queries, so the mask is transposed.
template <typename RowOf>
void add_bias_rows(int keys, int width, DType dtype, std::int64_t stride, float* tile, float* staging,
                   const RowOf& row) {
  const auto add = [&](int lane, int j, VF bias) HWY_ATTR {
    float* at = tile + j * width + lane;
    store(add_bias(load(at), bias), at);
  };
  float* gathered = staging + transpose_staging(keys);
  transpose_rows(
      width, keys, dtype, staging,
      [&](int lane) { return contiguous_row(row(lane), stride, dtype, keys, gathered); }, add);
}

inline void add_mask(const AttentionCall& call, const Panel& panel, const KeyTile& keys, float* tile,
                     float* bias, float* staging) {
  const MaskView& mask = call.mask;
  const std::int64_t stride = mask.stride[3];
  const bool same_for_all = mask.stride[2] == 0 && (mask.stride[1] == 0 || panel.one_head());
  if (same_for_all) {
    const std::byte* from = contiguous_row(mask.at(panel.b, panel.head[0], 0, keys.first), stride, mask.dtype,
                                           keys.count, staging);
    widen(bias, from, mask.dtype, keys.count, 1.0f);
    map_tile(tile, keys.count, panel.width,
             [&](int j, int, VF s) HWY_ATTR { return add_bias(s, set(bias[j])); });
    return;
  }
  add_bias_rows(keys.count, panel.width, mask.dtype, stride, tile, staging,
                [&](int lane) { return mask.at(panel.b, panel.head[lane], panel.query[lane], keys.first); });
}

/// Hides the keys that a tile of the block mask hides inside its block.
inline void hide_by_block_tile(const AttentionCall& call, const Panel& panel, const KeyTile& keys,
                               float* tile, float* staging) {
  const BlockView& blocks = call.blocks;
  add_bias_rows(keys.count, panel.width, DType::boolean, blocks.tile_stride[2], tile, staging, [&](int lane) {
    return blocks.tiles + keys.block_tile * blocks.tile_stride[0] +
           panel.query[lane] % blocks.block_q * blocks.tile_stride[1] +
           keys.first % blocks.block_k * blocks.tile_stride[2];
  });
}

/// Hides the keys outside each lane's band [first_key, last_key).
inline void hide_outside(const Panel& panel, const KeyTile& keys, float* tile) {
  map_tile(tile, keys.count, panel.width, [&](int j, int lane, VF s) HWY_ATTR {
    const VI key = hn::Set(I(), static_cast<std::int32_t>(keys.first) + j);
    const auto before = hn::Lt(key, hn::Load(I(), panel.first_key + lane));
    const auto inside = hn::Lt(key, hn::Load(I(), panel.last_key + lane));
    return hn::IfThenElse(hn::RebindMask(F(), hn::AndNot(before, inside)), s, set(minus_infinity));
  });
}

/// The scratch of the functions above.
struct ScoreScratch {
  float* bias;         // [tile keys, width]
  float* staging;      // staging_floats()
  float* tanh_values;  // [tile keys, width]: the tanh of softcap, kept for backward; may be null
};

/// The size of a staging buffer that suffices to transpose rows of `dim` elements or mask rows of `keys`
/// elements, in both directions.
constexpr std::int64_t staging_floats(std::int64_t dim, std::int64_t keys) {
  return std::max(transpose_staging(std::max(dim, keys)) + keys, 4 * std::max(dim, keys));
}

/// Turns scale·q·k into the score.
inline void score_tile(const AttentionCall& call, const Panel& panel, const KeyTile& keys, float* tile,
                       const ScoreScratch& scratch) {
  const AttentionFeatures& features = call.problem.features;
  if (features.softcap) apply_softcap(call, keys.count, panel.width, tile, scratch.tanh_values);
  if (features.alibi) add_alibi(call, panel, keys, tile);
  if (features.mask != MaskKind::none) add_mask(call, panel, keys, tile, scratch.bias, scratch.staging);
  if (keys.block_tile >= 0) hide_by_block_tile(call, panel, keys, tile, scratch.staging);
  if (keys.edge) hide_outside(panel, keys, tile);
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
