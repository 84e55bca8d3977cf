#pragma once

#include "cuda/attention/common/f32/split_rows.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/backward_f32/backward.h"
#include "cuda/attention/sm80/backward_f32/space.h"

namespace tilewise::cuda::mma_f32 {

/// What backward does beside splitting its four tensors, with the same rows: those of d_o meet o, for what is
/// known of a query before the walk, and gradients become 0 where they will be added up. Head dims are
/// multiples of 4, and rows are aligned.
struct RowValuesBeside {
  static constexpr bool norms = true;
  static constexpr bool marks_tiles = false;
  static constexpr int few_queries = few_backward_queries;
  enum Which { keys, values, queries, d_o, count };  ///< the order in which they are split

  RowValues to;
  simt::Peaks peaks;
  bool adds_key_gradients = false;

  template <int lanes>
  __device__ void row(const AttentionCall& call, const SplitPlace& at, const float (&x)[8],
                      bool present) const {
    if (at.which == d_o) return find<lanes>(call, at, x, present);
    if (!present) return;
    if (at.which == queries) clear(call.dq, call.problem.dim_qk, at);
    if (at.which == keys && adds_key_gradients) clear(call.dk, call.problem.dim_qk, at);
    if (at.which == values && adds_key_gradients) clear(call.dv, call.problem.dim_v, at);
  }

 private:
  static __device__ void clear(const Rows& rows, std::int64_t dims, const SplitPlace& at) {
    if (!rows.wanted) return;
    auto* to = reinterpret_cast<float4*>(rows.at(at.b, at.h, at.s)) + 2 * at.chunk;
    if (8 * at.chunk < dims) to[0] = {};
    if (8 * at.chunk + 4 < dims) to[1] = {};
  }

  template <int lanes>
  __device__ void find(const AttentionCall& call, const SplitPlace& at, const float (&own)[8],
                       bool present) const {
    float o[8] = {};
    float lse = 0, d_lse = 0;
    if (present) {
      load_eight(o, reinterpret_cast<const float*>(call.o.at(at.b, at.h, at.s)), 8 * at.chunk,
                 static_cast<int>(call.problem.dim_v), true);
      lse = *reinterpret_cast<const float*>(call.lse.at(at.b, at.h, at.s));
      if (call.d_lse.wanted) d_lse = *reinterpret_cast<const float*>(call.d_lse.at(at.b, at.h, at.s));
    }
    float product = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) product = fmaf(o[n], own[n], product);
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) product += __shfl_xor_sync(~0u, product, apart);
    if (!present || at.chunk != 0) return;
    const std::int64_t row = at.h * call.rows_q() + call.first_row_q(at.b) + at.i;
    const bool unseen = lse == minus_infinity;
    // Exponents lose digits the farther they are from 0. Weights of a row lie around 1 over the number of
    // keys; half the logarithm of that leaves some to the highest ones.
    const KeyRange seen = call.keys_of(call.sequence(at.b), at.i);
    const int middle =
        unseen ? 0 : (31 - __clz(static_cast<int>(max(seen.last - seen.first, std::int64_t{1})))) / 2;
    const double exact = static_cast<double>(lse) * 1.4426950408889634 - middle;
    const auto top = static_cast<float>(exact);
    const auto rest = static_cast<float>(exact - static_cast<double>(top));
    to.top[row] = unseen ? -minus_infinity : top;
    to.factor[row] = unseen ? 0.0f : exp2f(-rest) * power_of_two(weight_bits - middle);
    to.shift[row] = unseen ? 0.0f : d_lse - product;
    peaks.clear(row);
  }
};

}  // namespace tilewise::cuda::mma_f32
