#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/sm80/forward/softmax.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// The softmax of a whole row. Four lanes share two or four rows, and each lane computes one of them: code
/// that runs once is bound by latency, so doing all rows in every lane would take longer.
template <ForwardConfig c, bool general>
struct LaneRow {
  static constexpr int count = 2 * c.row_tiles;
  static_assert(count <= 4);
  int row;             ///< among the CTA's rows
  bool first;          ///< whether this is the first of the lanes that have the row
  float sum, rounded;  ///< of P in f32, and of P as rounded for P·V
  float maximum;       ///< of the row's scores, in natural units
  float factor = 1;    ///< brings the sums and O to this maximum

  __device__ LaneRow(const AttentionCall& call, const Exponents<general>& exponents, const Place<c>& place,
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
  /// To be called with the sums over all keys of the row. Where warps are paired, these are sums of two
  /// warps.
  __device__ void complete(const AttentionCall& call, const Exponents<general>& exponents) {
    if constexpr (!general) {
      if (sum > 0) factor = exp2f(fmaf(-maximum, exponents.scale_log2, exponents.reference(maximum)));
      maximum = fmaxf(maximum * static_cast<float>(call.scale), lowest);
    } else {
      factor = exp2f(-exponents.p_scale_bits);
    }
  }
};

/// Joins the sink and writes the row's LSE. Returns the factor of the row's sum of P·V.
template <ForwardConfig c, bool general>
__device__ __forceinline__ float finish_row(const AttentionCall& call, const QueryRows& rows,
                                            const LaneRow<c, general>& lane_row) {
  float maximum = lane_row.maximum;
  float factor = lane_row.factor;
  float sink_p = 0;
  if (call.problem.features.sinks && lane_row.row < rows.count()) {
    const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(lane_row.row)));
    factor *= join_sink(sink, maximum, sink_p);
  }
  if (call.lse.wanted && lane_row.row < rows.count() && lane_row.first) {
    const float total = lane_row.sum * factor + sink_p;
    const float lse = total == 0 ? minus_infinity : maximum + logf(total);
    *rows.float_of(call.lse, lane_row.row) = lse;
  }
  const float rounded = lane_row.rounded * factor + sink_p;
  const float keep_scale = general && call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  return rounded == 0 ? 0.0f : factor * keep_scale / rounded;
}

/// Copies a warp's rows, or `chunks` of their chunks of 16 bytes from chunk `first` on, from shared memory to
/// O.
template <ForwardConfig c, int chunks>
__device__ __forceinline__ void store_rows(const AttentionCall& call, const QueryRows& rows,
                                           const Place<c>& place, const std::byte* rows_smem, int first) {
  using Tile = SwizzledTile<c.dim>;
  const auto dims = static_cast<int>(call.problem.dim_v);
  const bool aligned = aligned_chunks(call.o);
  const auto stride = static_cast<int>(call.o.stride_s * 2);
  std::byte* o = rows.row_of(call.o, 0);
  constexpr int step = 32 / chunks;  // rows from one of a lane to its next
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

/// Normalises a warp's rows of O, or their chunks from `first` on, and writes them through shared memory, so
/// that global memory is written 16 bytes at a time. `own_inverse` is that of the lane's row.
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
  __syncwarp();  // the warp's rows are in shared memory
  store_rows<c, chunks>(call, rows, place, rows_smem, first);
}

}  // namespace tilewise::cuda::mma
