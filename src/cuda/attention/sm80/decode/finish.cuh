#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm80/decode/config.h"
#include "cuda/attention/sm80/decode/rows.cuh"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::mma {

// How the warps' results are joined, after the last key.

/// A CTA's shared memory: the rings, in whose place the warps' O are joined, and behind them the sums.
template <int dim, typename C>
struct DecodeMemory {
  /// Floats from row to row of a warp's O. Rows 2t begin in different banks.
  static constexpr int o_stride = dim + 4;
  static_assert(C::rows * o_stride * 4 <= C::ring_bytes);
  std::byte* const all;

  __device__ std::byte* ring(int warp) const { return all + warp * C::ring_bytes; }
  __device__ float* o(int warp, int row) const {
    return reinterpret_cast<float*>(ring(warp)) + row * o_stride;
  }
  __device__ float& maximum(int warp, int row) const { return sums()[warp * C::rows + row]; }
  __device__ float& sum(int warp, int row) const { return sums()[(C::warps + warp) * C::rows + row]; }

 private:
  __device__ float* sums() const { return reinterpret_cast<float*>(all + C::warps * C::ring_bytes); }
};

/// Writes what a warp has to shared memory.
template <typename T, int dim, typename C>
__device__ __forceinline__ void share(const DecodeRows<T, dim>& own, int row_count,
                                      const DecodeMemory<dim, C>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float sum = row_sum(own.sum);
  if (own.t == 0) {
    shared.maximum(warp, own.g) = own.maximum;
    shared.sum(warp, own.g) = sum;
  }
  __syncwarp();  // the warp has read its whole ring, which O overwrites
#pragma unroll
  for (int after = 0; after < 2; ++after) {
    const int r = 2 * own.t + after;
    if (r >= row_count) continue;
#pragma unroll
    for (int n = 0; n < dim / 16; ++n) {
      shared.o(warp, r)[16 * n + own.g] = own.o[n][after];
      shared.o(warp, r)[16 * n + 8 + own.g] = own.o[n][2 + after];
    }
  }
}

/// Four dims of a row, from the results of all warps: O is not normalised, and relative to the maximum.
struct JoinedRow {
  float maximum, total = 0;
  float4 o = {};

  template <int dim, typename C>
  __device__ __forceinline__ JoinedRow(const DecodeMemory<dim, C>& shared, int r, int d)
      : maximum(shared.maximum(0, r)) {
#pragma unroll
    for (int w = 1; w < C::warps; ++w) maximum = fmaxf(maximum, shared.maximum(w, r));
#pragma unroll
    for (int w = 0; w < C::warps; ++w) {
      const float factor = exp2f((shared.maximum(w, r) - maximum) * log2e);
      total = fmaf(shared.sum(w, r), factor, total);
      const float4 more = *reinterpret_cast<const float4*>(shared.o(w, r) + d);
      o = {fmaf(more.x, factor, o.x), fmaf(more.y, factor, o.y), fmaf(more.z, factor, o.z),
           fmaf(more.w, factor, o.w)};
    }
  }
  /// Writes the partial results of a split.
  __device__ __forceinline__ void store_split(const Splits& splits, int split, std::int64_t row,
                                              int d) const {
    *reinterpret_cast<float4*>(splits.o(split, row) + d) = o;
    if (d > 0) return;
    float* state = splits.state(split, row);
    state[0] = maximum;
    state[1] = state[2] = total;
  }
  /// Writes O and, with the first dims, LSE.
  template <typename T>
  __device__ __forceinline__ void store(const AttentionCall& call, const QueryRows& rows, int r, int d) {
    float factor = 1;
    if (call.problem.features.sinks) {
      const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(r)));
      float sink_p;
      factor = join_sink(sink, maximum, sink_p);
      total = total * factor + sink_p;
    }
    if (call.lse.wanted && d == 0) {
      *rows.float_of(call.lse, r) = total == 0 ? minus_infinity : maximum + logf(total);
    }
    const float inverse = total == 0 ? 0.0f : factor / total;
    store_4(reinterpret_cast<T*>(rows.row_of(call.o, r)) + d,
            {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse});
  }
};

/// Joins the results of the CTA's warps and writes them.
template <typename T, int dim, typename C>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryRows& rows, const Splits& splits,
                                       const DecodeMemory<dim, C>& shared, const DecodeRows<T, dim>& own) {
  share(own, rows.count(), shared);
  __syncthreads();  // O, maxima and sums of all warps are there
  const auto split = static_cast<int>(blockIdx.y);
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < rows.count() * (dim / 4); index += C::threads) {
    const int r = index / (dim / 4), d = index % (dim / 4) * 4;
    JoinedRow joined(shared, r, d);
    if (splits.count == 1) {
      joined.template store<T>(call, rows, r, d);
    } else {
      const std::int64_t row = Splits::row(call, rows.queries.b, rows.head(r), rows.query(r));
      joined.store_split(splits, split, row, d);
    }
  }
}

}  // namespace tilewise::cuda::mma
