// The online softmax of a panel: a running maximum and sum per lane, updated with each tile.

#if defined(TILEWISE_CPU_SIMD_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_SOFTMAX_INL_H
#undef TILEWISE_CPU_SIMD_SOFTMAX_INL_H
#else
#define TILEWISE_CPU_SIMD_SOFTMAX_INL_H
#endif

#include "cpu/simd/panel.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// The running maximum and sum of each lane. The maximum starts at the lowest finite number and not at −inf,
/// so that a row that has seen no key yet needs no special case: its differences are −inf or 0, never NaN.
struct SoftmaxState {
  alignas(64) float maximum[max_panel_width];
  alignas(64) float sum[max_panel_width];

  void reset(int width) {
    std::fill_n(maximum, width, std::numeric_limits<float>::lowest());
    std::fill_n(sum, width, 0.0f);
  }
};

/// Calls body(j, part) for all keys j, where `part` says which of four accumulators takes key j. Four short
/// sums have a smaller error than one long sum, and their additions overlap.
template <typename Body>
HWY_INLINE void for_each_of_four(int keys, const Body& body) {
  int j = 0;
  for (; j + 4 <= keys; j += 4) {
    for (int part = 0; part < 4; ++part) body(j + part, part);
  }
  for (; j < keys; ++j) body(j, 0);
}

HWY_INLINE VF sum_of(const VF (&part)[4]) {
  return hn::Add(hn::Add(part[0], part[1]), hn::Add(part[2], part[3]));
}

/// The maximum of `start` and one vector column of a tile, per lane.
HWY_INLINE VF column_maximum(const float* column, int keys, int width, VF start) {
  VF highest[4] = {start, start, start, start};
  for_each_of_four(keys, [&](int j, int part)
                             HWY_ATTR { highest[part] = hn::Max(highest[part], load(column + j * width)); });
  return hn::Max(hn::Max(highest[0], highest[1]), hn::Max(highest[2], highest[3]));
}

/// Replaces the scores by exp(s − maximum) and updates the state. `rescale` receives the factor by which sums
/// that were computed with the previous maximum must be multiplied.
inline void softmax_tile(float* tile, int keys, int width, SoftmaxState& state, float* rescale) {
  for (int lane = 0; lane < width; lane += lanes) {
    const VF before = hn::Load(F(), state.maximum + lane);
    float* column = tile + lane;
    const VF maximum = column_maximum(column, keys, width, before);
    const VF factor = exp_of(hn::Sub(before, maximum));
    // The sum of the tile is computed separately, since the sum of the tiles before may be much larger.
    VF sum[4] = {hn::Zero(F()), hn::Zero(F()), hn::Zero(F()), hn::Zero(F())};
    for_each_of_four(keys, [&](int j, int part) HWY_ATTR {
      const VF p = exp_of(hn::Sub(load(column + j * width), maximum));
      store(p, column + j * width);
      sum[part] = hn::Add(sum[part], p);
    });
    hn::Store(maximum, F(), state.maximum + lane);
    hn::Store(hn::MulAdd(hn::Load(F(), state.sum + lane), factor, sum_of(sum)), F(), state.sum + lane);
    hn::Store(factor, F(), rescale + lane);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
