#pragma once

#include "cuda/attention/simt/backward/stage.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/reduce.cuh"

namespace tilewise::cuda::simt {

// What the pairs of two tiles add to dk, dv and dq: sums that a block keeps in registers and stores at its
// end, and those that it adds to global memory.

/// Where the sums of a lane are in [own, piece] of its half's gradient: 8 x 8, or 4 x 8 of small tiles.
template <typename C>
struct OwnPlace {
  int rows, dims;  // the lane's first, in fours
  __device__ explicit OwnPlace(const Place<C>& place)
      : rows(place.in_half % 2 * C::R + place.lane.row), dims(place.in_half / 2 * 16 + place.lane.column) {}
  __device__ int row(int m) const { return in_runs<2 * C::R>(rows, m); }
  __device__ int dim(int n) const { return in_runs<C::C>(dims, n); }
};

template <typename C>
__device__ __forceinline__ void add_to_own(float (&sum)[C::own_each][8], const float* pairs,
                                           const float* rows, int count, const OwnPlace<C>& at) {
  add_product(sum, Transposed<C::pair_stride, 2 * C::R>{pairs + at.rows * 4},
              Transposed<C::row_stride, C::C>{rows + at.dims * 4}, (count + 7) / 8 * 8);
}

template <typename C, bool general>
__device__ __forceinline__ void store_own(const Rows& rows, const float (&sum)[C::own_each][8], float factor,
                                          int valid, int first_dim, int dims, const OwnPlace<C>& at,
                                          std::int64_t b, std::int64_t h, std::int64_t first_row) {
  const bool aligned = general && aligned_rows(rows, dims);
#pragma unroll
  for (int m = 0; m < C::own_each; ++m) {
    const int r = at.row(m);
    if (r >= valid) continue;
    std::byte* to = rows.at(b, h, first_row + r) + first_dim * size_of(rows.dtype);
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const float4 four{factor * sum[m][n], factor * sum[m][n + 1], factor * sum[m][n + 2],
                        factor * sum[m][n + 3]};
      if constexpr (general) {
        store_chunk(to, rows.dtype, at.dim(n), dims - first_dim, aligned, four);
      } else if (at.dim(n) < dims) {
        store_4(reinterpret_cast<float*>(to) + at.dim(n), four);
      }
    }
  }
}

/// dq += dscores · k, by all warps: a quarter of the queries and 64 dims each.
template <typename C, bool general>
__device__ __forceinline__ void add_dq(const Stage<C, Side::keys, general>& stage, const Rows& dq_sum,
                                       const QueryTile& query, const KeyTile& keys, int piece,
                                       const Place<C>& place) {
  constexpr int rows_each = C::tile / 16;
  const int first_row = place.warp % 4 * (C::tile / 4);
  const int first_dim = place.warp / 4 * 64;
  float dq[rows_each][8] = {};
  multiply_rows_transposed(
      dq, ByRows<C::pair_stride, C::R>{stage.dscores + (first_row + place.lane.row) * C::pair_stride},
      Transposed<C::row_stride, C::C>{stage.own + first_dim + place.lane.column * 4},
      (keys.count + 7) / 8 * 8);
  const auto scale = static_cast<float>(stage.call.scale);
  const int dims = stage.dims_qk(piece);
  const bool aligned = !general || aligned_rows(dq_sum, stage.dim_qk);
  const std::int64_t s = query.sequence.first_q + query.first;
#pragma unroll
  for (int m = 0; m < rows_each; ++m) {
    const int r = first_row + in_steps<C::R>(place.lane.row, m);
    if (r >= query.count) continue;
    auto* to = reinterpret_cast<float*>(dq_sum.at(query.b, query.h, s + r)) + piece * C::dim;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const int d = first_dim + in_runs<C::C>(place.lane.column, n);
      if (d >= dims) continue;
      if (aligned) {
        add_4(to + d, {scale * dq[m][n], scale * dq[m][n + 1], scale * dq[m][n + 2], scale * dq[m][n + 3]});
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (d + k < dims) atomicAdd(to + d + k, scale * dq[m][n + k]);
        }
      }
    }
  }
}

/// The sums of the query heads of a group, each summed by itself before it is added, in local memory. For
/// kernels whose tiles may be as small as a block mask's blocks; where tiles are full it makes no difference.
template <typename C>
class GroupSum {
 public:
  __device__ void add(float (&sum)[C::own_each][8]) {
    float* sums = in_memory(sums_);
#pragma unroll
    for (int n = 0; n < C::own_each * 8; ++n) {
      sums[n] = any_ ? sums[n] + sum[n / 8][n % 8] : sum[n / 8][n % 8];
      sum[n / 8][n % 8] = 0;
    }
    any_ = true;
  }
  __device__ void join(float (&sum)[C::own_each][8]) {
    if (!any_) return;
    const float* sums = in_memory(sums_);
#pragma unroll
    for (int n = 0; n < C::own_each * 8; ++n) sum[n / 8][n % 8] += sums[n];
  }

 private:
  float sums_[C::own_each * 8];
  bool any_ = false;
};

}  // namespace tilewise::cuda::simt
