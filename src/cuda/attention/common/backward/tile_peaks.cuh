#pragma once

#include "cuda/attention/common/backward/space.cuh"

namespace tilewise::cuda::mma {

// Weights and score gradients are rounded to 16 bits on their way into dv, dk and dq. That takes the more
// from a sum the fewer terms matter in it. And a score's gradient, weight·(d_o·v − d_o·o + d_lse), may be a
// difference of nearly equal numbers of which one has the rounding of o. Both matter where weights are high.
// So those above a limit are left out of all three products, and what they add is added at the end in f32.
// With x = d_o·v + shift known up to a constant that all keys of a row share,
//
//   gradient of f = weight_f · (Σ_j weight_j·(x_f − x_j) + d_lse)
//
// where the sum over the others is made on the way, and the constant drops out. A sink is one of them, whose
// d_o·v is 0. What lse was rounded by is in all weights of a row alike; the general kernel, where lse may be
// large, sums them up too and divides by all of them.

/// The peaks of a query.
struct RowPeaks {
  const RowValues& rows;
  std::int64_t row;
  int count;

  __device__ RowPeaks(const RowValues& rows_, std::int64_t row_, bool there)
      : rows(rows_), row(row_), count(there ? min(rows.peak_count[row], rows_.limits.most) : 0) {}

  __device__ Peak& at(int f) const { return rows.peaks[row * rows.limits.most + f]; }

  /// Puts the gradient of q·k before the score's scale, times the score gradients', in the place of x; and in
  /// that of the key its row in k. Differences are from the x of the highest peak: so what a row's only peak
  /// is compared with is the others alone, and of two neither loses anything. `keys` are those that the band
  /// leaves to the query: where all of them are peaks, there are no others. By weights alone there might be
  /// some: they are off 1 by what f32 keeps of lse, and so would be the gradient of an only key, which is 0.
  __device__ void settle(float d_lse, const GradientScale& scale, int first_k, std::int64_t keys) const {
    float high = 0;  // the weight of peaks
    Peak top{};
    for (int f = 0; f < count; ++f) {
      const Peak own = at(f);
      high += fabsf(own.weight);
      if (fabsf(own.weight) > fabsf(top.weight)) top = own;
    }
    float high_sum = 0;  // of weight·x
    for (int f = 0; f < count; ++f) high_sum = fmaf(fabsf(at(f).weight), at(f).x - top.x, high_sum);
    const float sink = rows.sink_weight == nullptr ? 0.0f : rows.sink_weight[row];
    float others = sink;
    if (rows.rest_weight != nullptr) {
      others += rows.rest_weight[row];
    } else if (count < keys) {
      others = fmaxf(0.0f, 1 - high);
    }
    const float total = rows.rest_weight == nullptr ? 1.0f : others + high;
    float rest = 0;
#pragma unroll
    for (int part = 0; part < RowValues::rest_parts; ++part) rest += rows.rest[part * rows.count + row];
    if (sink > 0) rest = fmaf(sink * scale.up, rows.shift[row], rest);
    for (int f = 0; f < count; ++f) {
      const Peak own = at(f);
      const float sum = fmaf(others, own.x, fmaf(high, own.x - top.x, -high_sum));
      const float slope = rows.peak_slope == nullptr ? 1.0f : rows.peak_slope[row * rows.limits.most + f];
      at(f) = {
          .key = own.key + first_k,
          .weight = own.weight,
          .x = fabsf(own.weight) / total * (fmaf(scale.up, sum, -rest) / total + scale.up * d_lse) * slope};
    }
  }
  /// By their keys: they came in whatever order.
  __device__ void sort() const {
    for (int f = 1; f < count; ++f) {
      for (int g = f; g > 0 && at(g).key < at(g - 1).key; --g) {
        exchange(rows.peaks + row * rows.limits.most + g);
        if (rows.peak_slope != nullptr) exchange(rows.peak_slope + row * rows.limits.most + g);
      }
    }
  }

 private:
  template <typename Value>
  static __device__ void exchange(Value* at) {
    const Value kept = at[-1];
    at[-1] = at[0];
    at[0] = kept;
  }
};

}  // namespace tilewise::cuda::mma
