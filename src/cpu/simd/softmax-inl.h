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

/// The highest of `start` and a column of a tile, lane by lane. Four at a time, as a maximum takes its time.
HWY_INLINE VF highest_score(const float* column, int keys, int width, VF start) {
  VF highest[4] = {start, start, start, start};
  int j = 0;
  for (; j + 4 <= keys; j += 4) {
    for (int n = 0; n < 4; ++n) highest[n] = hn::Max(highest[n], load(column + (j + n) * width));
  }
  for (; j < keys; ++j) highest[0] = hn::Max(highest[0], load(column + j * width));
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
    // A tile's weights are summed apart from the sum of before, which may be much larger.
    VF sum[2] = {hn::Zero(F()), hn::Zero(F())};
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
      for (int n = 0; n < 2; ++n) {
        float* at = column + (j + n) * width;
        const VF weight = exp_of(hn::Sub(load(at), maximum));
        store(weight, at);
        sum[n] = hn::Add(sum[n], weight);
      }
    }
    for (; j < keys; ++j) {
      const VF weight = exp_of(hn::Sub(load(column + j * width), maximum));
      store(weight, column + j * width);
      sum[0] = hn::Add(sum[0], weight);
    }
    hn::Store(maximum, F(), state.maximum + lane);
    hn::Store(hn::MulAdd(hn::Load(F(), state.sum + lane), factor, hn::Add(sum[0], sum[1])), F(),
              state.sum + lane);
    hn::Store(factor, F(), rescale + lane);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
