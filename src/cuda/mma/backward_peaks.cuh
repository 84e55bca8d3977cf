#pragma once

#include "cuda/mma/backward_space.cuh"

namespace tilewise::cuda::mma {

// A weight above least_peak is a peak. Its score's gradient, weight·(d_o·v − d_o·o + d_lse), may be a
// difference of nearly equal numbers of which one has the rounding of o, and is often the largest of its row.
// So the pair is left out, and mended at the end in f32: with x known up to a constant that all keys of a row
// share,
//
//   gradient of f = weight_f · (Σ_j weight_j·(x_f − x_j) + d_lse)
//
// where the sum over the others is made on the way, and the constant drops out. A sink is one of them, whose
// d_o·v is 0.

/// The peaks of a query by their keys, and the gradients of their scores, times the score gradients' scale.
struct Mended {
  int count = 0;
  std::int64_t key[most_peaks] = {};
  float gradient[most_peaks] = {};  ///< of q·k before the score's scale

  Mended() = default;
  __device__ Mended(const RowValues& rows, std::int64_t row, float d_lse, const GradientScale& scale)
      : count(min(rows.peak_count[row], most_peaks)) {
    if (count == 0) return;
    float others = 1;  // their weight
    float weight[most_peaks] = {}, x[most_peaks] = {}, slope[most_peaks] = {};
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      key[f] = last_key;
      if (f >= count) continue;
      const Peak peak = rows.peaks[row * most_peaks + f];
      key[f] = peak.key;
      weight[f] = peak.weight;
      x[f] = peak.x;
      slope[f] = rows.peak_slope == nullptr ? 1.0f : rows.peak_slope[row * most_peaks + f];
    }
    // They came in whatever order.
    const auto put_in_order = [&](int f, int g) {
      if (key[f] <= key[g]) return;
      exchange(key[f], key[g]);
      exchange(weight[f], weight[g]);
      exchange(x[f], x[g]);
      exchange(slope[f], slope[g]);
    };
    static_assert(most_peaks == 3);
    put_in_order(0, 1);
    put_in_order(1, 2);
    put_in_order(0, 1);
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) others -= weight[f];
    others = fmaxf(0.0f, others);
    float rest = 0;
#pragma unroll
    for (int part = 0; part < RowValues::rest_parts; ++part) rest += rows.rest[part * rows.count + row];
    if (rows.sink_weight != nullptr) rest = fmaf(rows.sink_weight[row] * scale.up, rows.shift[row], rest);
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      float sum = fmaf(others, x[f], d_lse);
#pragma unroll
      for (int g = 0; g < most_peaks; ++g) sum = fmaf(weight[g], x[f] - x[g], sum);
      gradient[f] = weight[f] * fmaf(scale.up, sum, -rest) * slope[f];
    }
  }

 private:
  static constexpr std::int64_t last_key = 0x7fffffffffffffff;

  template <typename Value>
  static __device__ void exchange(Value& a, Value& b) {
    const Value kept = a;
    a = b;
    b = kept;
  }
};

}  // namespace tilewise::cuda::mma
