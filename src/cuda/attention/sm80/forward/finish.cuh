#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/sm80/forward/softmax.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// What a row came to. Four lanes share two or four rows; each does the arithmetic of one, since code that
/// runs once is mostly waited for.
template <ForwardConfig c, bool general>
struct OwnRow {
  static constexpr int count = 2 * c.row_tiles;
  static_assert(count <= 4);
  int row;             ///< of the block
  bool first;          ///< of the lanes that have it
  float sum, rounded;  ///< of its weights, as they are and as o has them
  float maximum;       ///< of its scores, in natural units
  float factor = 1;    ///< makes sums, and o, relative to that

  __device__ OwnRow(const AttentionCall& call, const Exponents<general>& exponents, const Place<c>& place,
                    const SoftmaxRows<c>& softmax) {
    const int own = place.lane % count;
    row = place.row(own / 2, own % 2);
    first = place.lane % 4 < count;
#pragma unroll
    for (int index = 0; index < count; ++index) {
      const float row_total = row_sum(softmax.sum[index / 2][index % 2]);
      if (index != own) continue;
      sum = row_total;
      maximum = softmax.maximum[index / 2][index % 2];
      rounded = softmax.rounded[index / 2][index % 2 * 2];
    }
    if constexpr (!c.paired) complete(call, exponents);
  }
  /// Of the sums of all the row's keys, which are two warps' where those are paired.
  __device__ void complete(const AttentionCall& call, const Exponents<general>& exponents) {
    if constexpr (!general) {
      if (sum > 0) factor = exp2f(fmaf(-maximum, exponents.unit, exponents.reference(maximum)));
      maximum = fmaxf(maximum * static_cast<float>(call.scale), lowest);
    } else {
      factor = exp2f(-exponents.above);
    }
  }
};

/// What a row's sum of values is to be multiplied by, and its lse, which is written.
template <ForwardConfig c, bool general>
__device__ __forceinline__ float finish_row(const AttentionCall& call, const QueryRows& rows,
                                            const OwnRow<c, general>& own) {
  float maximum = own.maximum;
  float factor = own.factor;
  float sink_weight = 0;
  if (call.problem.features.sinks && own.row < rows.count()) {
    const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(own.row)));
    factor *= join_sink(sink, maximum, sink_weight);
  }
  if (call.lse.wanted && own.row < rows.count() && own.first) {
    const float total = own.sum * factor + sink_weight;
    const float lse = total == 0 ? minus_infinity : maximum + logf(total);
    *rows.float_of(call.lse, own.row) = lse;
  }
  const float rounded = own.rounded * factor + sink_weight;
  const float keep_scale = general && call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  return rounded == 0 ? 0.0f : factor * keep_scale / rounded;
}

/// Writes a warp's rows, or the part of them from chunk `first` on, `chunks` of 16 bytes each, from their
/// places in shared memory to o.
template <ForwardConfig c, int chunks>
__device__ __forceinline__ void store_rows(const AttentionCall& call, const QueryRows& rows,
                                           const Place<c>& place, const std::byte* rows_smem, int first) {
  using Tile = SwizzledTile<c.dim>;
  const auto dims = static_cast<int>(call.problem.dim_v);
  const bool aligned = aligned_chunks(call.o);
  const auto stride = static_cast<int>(call.o.stride_s * 2);
  std::byte* o = rows.row_of(call.o, 0);
  constexpr int step = 32 / chunks;  // rows between those of a lane
  if constexpr (step > 0 && 32 % chunks == 0 && Tile::period == 8) {
    if (rows.heads == 1 && rows.count() == c.rows() && dims == c.dim && aligned &&
        stride == call.o.stride_s * 2) {
      const int row = place.first_row() + place.lane / chunks;
      const int chunk = first + place.lane % chunks;
      const std::byte* from = rows_smem + row * Tile::row_bytes;
      std::byte* to = o + std::int64_t{stride} * row + chunk * 16;
#pragma unroll
      for (int r = 0; r < c.warp_rows(); r += step) {
        const int swizzled = (chunk ^ Tile::phase_of(place.lane / chunks)) ^ r % 8;
        *reinterpret_cast<uint4*>(to + std::int64_t{stride} * r) =
            *reinterpret_cast<const uint4*>(from + r * Tile::row_bytes + swizzled * 16);
      }
      return;
    }
  }
#pragma unroll 4
  for (int index = place.lane; index < c.warp_rows() * chunks; index += 32) {
    const int row = place.first_row() + index / chunks;
    const int chunk = first + index % chunks;
    if (row >= rows.count() || chunk * 8 >= dims) continue;
    std::byte* to = rows.heads == 1 ? o + row * call.o.stride_s * 2 : rows.row_of(call.o, row);
    store_eight(to, chunk * 8, dims, aligned,
                *reinterpret_cast<const uint4*>(rows_smem + Tile::offset(row, chunk)));
  }
}

/// Divides a warp's rows, or the part of them from chunk `first` on, and writes them to o; by way of their
/// places in shared memory, so that rows are written 16 bytes at a time. `own_inverse` is that of the lane's
/// OwnRow.
template <typename T, ForwardConfig c, int chunks>
__device__ __forceinline__ void write_output(const AttentionCall& call, const QueryRows& rows,
                                             const Place<c>& place, const float (&o)[c.row_tiles][chunks][4],
                                             float own_inverse, std::byte* rows_smem, int first) {
  using Tile = SwizzledTile<c.dim>;
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(r, half);
      const float inverse = __shfl_sync(~0u, own_inverse, place.lane / 4 * 4 + 2 * r + half);
#pragma unroll
      for (int n = 0; n < chunks; ++n) {
        *reinterpret_cast<std::uint32_t*>(rows_smem + Tile::offset(row, first + n) + 2 * place.column()) =
            pack<T>(o[r][n][2 * half] * inverse, o[r][n][2 * half + 1] * inverse);
      }
    }
  }
  __syncwarp();  // the warp's rows are there
  store_rows<c, chunks>(call, rows, place, rows_smem, first);
}

}  // namespace tilewise::cuda::mma
