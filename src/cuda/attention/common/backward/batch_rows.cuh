#pragma once

#include "cuda/attention/common/backward/space.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/tile/team.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::mma {

// The rows of a whole call, for the kernels before and after the one that computes the gradients.

inline constexpr int row_threads = 256;

/// The lanes that share a row, eight elements each.
template <int lanes_>
struct RowLanes {
  static constexpr int lanes = lanes_;
  int lane = static_cast<int>(threadIdx.x) % lanes;
  std::int64_t row;

  __device__ explicit RowLanes(std::int64_t block) : row((block * row_threads + threadIdx.x) / lanes) {}
  static std::int64_t blocks(std::int64_t rows) { return (rows * lanes + row_threads - 1) / row_threads; }
  __device__ static float sum(float x) { return sum_over<lanes>(x); }
};

/// Division with remainder. It is slow in 64 bits, which are rarely needed.
struct Division {
  std::int64_t quotient, remainder;

  __device__ Division(std::int64_t a, std::int64_t b) {
    if (((a | b) >> 32) == 0) {
      quotient = static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
    } else {
      quotient = a / b;
    }
    remainder = a - quotient * b;
  }
};

/// Row `index` of [heads, rows of the batch]. Rows past the last packed sequence belong to no sequence.
struct BatchRow {
  std::int64_t b, h, s;
  bool owned;

  __device__ static BatchRow of_query(const AttentionCall& call, std::int64_t index) {
    const Division head_row(index, call.rows_q());
    BatchRow row{0, head_row.quotient, head_row.remainder, head_row.quotient < call.problem.heads_q};
    if (call.packed()) {
      row.owned = row.owned && row.s < call.cumulative_q.at(call.problem.batch);
    } else {
      const Division entry(row.s, call.problem.length_q);
      row.b = entry.quotient;
      row.s = entry.remainder;
    }
    return row;
  }
  __device__ static BatchRow of_key(const AttentionCall& call, std::int64_t index) {
    const Division head_row(index, call.rows_k());
    BatchRow row{0, head_row.quotient, head_row.remainder, head_row.quotient < call.problem.heads_kv};
    if (call.packed()) {
      row.owned = row.owned && row.s < call.cumulative_k.at(call.problem.batch);
    } else {
      const Division entry(row.s, call.problem.length_k);
      row.b = entry.quotient;
      row.s = entry.remainder;
      row.owned = row.owned && row.s < call.sequence(row.b).length_k;
    }
    return row;
  }
  /// The sequence of a query, and its index there.
  struct InSequence {
    std::int64_t b, i;
  };
  __device__ InSequence in_sequence(const AttentionCall& call) const {
    if (!call.packed()) return {b, s};
    std::int64_t low = 0, high = call.problem.batch;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (call.cumulative_q.at(middle) <= s ? low : high) = middle;
    }
    return {low, s - call.cumulative_q.at(low)};
  }
};

/// Eight elements of a row from `first` on, with 0 past its end.
__device__ __forceinline__ uint4 eight_of(const std::byte* row, int first, int dims, bool aligned) {
  if (first + 8 <= dims && aligned) return *reinterpret_cast<const uint4*>(row + first * 2);
  const auto* from = reinterpret_cast<const std::uint16_t*>(row) + first;
  std::uint32_t word[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const std::uint32_t low = first + 2 * n < dims ? from[2 * n] : 0;
    const std::uint32_t high = first + 2 * n + 1 < dims ? from[2 * n + 1] : 0;
    word[n] = low | high << 16;
  }
  return {word[0], word[1], word[2], word[3]};
}
template <typename T>
__device__ __forceinline__ void unpack_eight(float (&to)[8], const uint4& eight) {
  const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two = unpack<T>(words[n]);
    to[2 * n] = two.x;
    to[2 * n + 1] = two.y;
  }
}
template <typename T>
__device__ __forceinline__ void load_eight(float (&to)[8], const std::byte* row, int first, int dims,
                                           bool aligned) {
  unpack_eight<T>(to, eight_of(row, first, dims, aligned));
}

__device__ __forceinline__ float d_lse_of(const AttentionCall& call, const BatchRow& row) {
  return call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(row.b, row.h, row.s)) : 0.0f;
}

/// The scale of dS.
template <typename T>
__device__ __forceinline__ GradientScale gradient_scale(const AttentionCall& call,
                                                        const BackwardSpace& space) {
  const AttentionFeatures& features = call.problem.features;
  return gradient_scale<T>(space.largest, features.dropout ? call.dropout.keep_scale : 1.0f,
                           features.logit_scale);
}

/// Calls `body` with the call's type and as many lanes as its rows need.
template <typename Body>
void with_lanes(const AttentionCall& call, const Body& body) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  with_16_bit_type(call.problem.dtype, [&]<typename T>() {
    if (dim <= 64) return body.template operator()<T, 8>();
    if (dim <= 128) return body.template operator()<T, 16>();
    body.template operator()<T, 32>();
  });
}

}  // namespace tilewise::cuda::mma
