// Online softmax of a panel: running maximum and sum a lane, updated tile by tile.

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

/// Running statistics, one a lane. The maximum starts at the lowest finite number, not at −inf, so that a row
/// that has seen nothing yet needs no special case: its differences are −inf or 0, never NaN.
struct SoftmaxState {
  alignas(64) float maximum[max_panel_width];
  alignas(64) float sum[max_panel_width];

  void reset(int width) {
    std::fill_n(maximum, width, std::numeric_limits<float>::lowest());
    std::fill_n(sum, width, 0.0f);
  }
};

/// Calls body(j, part) for all keys, part being one of four: several short sums have less error than a long
/// one, and need not wait for one another.
template <typename Body>
HWY_INLINE void in_fours(int keys, const Body& body) {
  int j = 0;
  for (; j + 4 <= keys; j += 4) {
    for (int part = 0; part < 4; ++part) body(j + part, part);
  }
  for (; j < keys; ++j) body(j, 0);
}

HWY_INLINE VF sum_of(const VF (&part)[4]) {
  return hn::Add(hn::Add(part[0], part[1]), hn::Add(part[2], part[3]));
}

/// The highest of `start` and a column of a tile, lane by lane.
HWY_INLINE VF highest_score(const float* column, int keys, int width, VF start) {
  VF highest[4] = {start, start, start, start};
  in_fours(keys, [&](int j, int part)
                     HWY_ATTR { highest[part] = hn::Max(highest[part], load(column + j * width)); });
  return hn::Max(hn::Max(highest[0], highest[1]), hn::Max(highest[2], highest[3]));
}

/// Turns scores into weights exp(s − maximum), updates the state, and leaves in `rescale` the factor for
/// what was summed under the maximum of before.
inline void softmax_tile(float* tile, int keys, int width, SoftmaxState& state, float* rescale) {
  for (int lane = 0; lane < width; lane += lanes) {
    const VF before = hn::Load(F(), state.maximum + lane);
    float* column = tile + lane;
    const VF maximum = highest_score(column, keys, width, before);
    const VF factor = exp_of(hn::Sub(before, maximum));
    // A tile's weights are summed apart from the sum of before, which may be much larger, and in four parts.
    VF sum[4] = {hn::Zero(F()), hn::Zero(F()), hn::Zero(F()), hn::Zero(F())};
    in_fours(keys, [&](int j, int part) HWY_ATTR {
      const VF weight = exp_of(hn::Sub(load(column + j * width), maximum));
      store(weight, column + j * width);
      sum[part] = hn::Add(sum[part], weight);
    });
    hn::Store(maximum, F(), state.maximum + lane);
    hn::Store(hn::MulAdd(hn::Load(F(), state.sum + lane), factor, sum_of(sum)), F(), state.sum + lane);
    hn::Store(factor, F(), rescale + lane);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
