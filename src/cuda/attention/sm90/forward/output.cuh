#pragma once

#include "cuda/attention/sm90/forward/softmax.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::wgmma {

/// A warp's 16 of a consumer's 64 rows.
struct WarpRows {
  int b, h;
  int first;       ///< first row, among the entry's
  int count;       ///< rows that exist, up to 16
  float sink;      ///< −inf if there is none
  int row_q;       ///< first row of the entry in the tensors
  int heads_log2;  ///< log2 of the number of packed heads
  int split;       ///< number of the split

  /// Head and query of a row.
  __device__ int head(int row) const { return (h << heads_log2) + ((first + row) & ((1 << heads_log2) - 1)); }
  __device__ int query(int row) const { return row_q + ((first + row) >> heads_log2); }
  __device__ std::byte* row_of_o(const ForwardArguments& arguments, int row) const {
    return row_of_halves(arguments.o, b, head(row), query(row));
  }
  __device__ void write_lse(const ForwardArguments& arguments, int row, float lse) const {
    if (arguments.lse.wanted && row < count) {
      *reinterpret_cast<float*>(arguments.lse.at(b, head(row), query(row))) = lse;
    }
  }
  /// A row of the split's partial O.
  __device__ float* row_of_split(const DecodeArguments& decode, int row) const {
    return reinterpret_cast<float*>(decode.o.at(b, head(row), query(row))) +
           split * decode.rows * decode.o.stride_s;
  }
  __device__ void write_lse_of_split(const DecodeArguments& decode, int row, float lse) const {
    if (row < count)
      reinterpret_cast<float*>(decode.lse.at(b, head(row), query(row)))[split * decode.rows] = lse;
  }
};

/// Adds a sink, a score without a value, to a row's LSE. Returns the factor for O. Other kernels add it to
/// the maximum and the sum (score.cuh); here, as in the combine of splits, only LSE is at hand.
__device__ __forceinline__ float join_sink(float sink, float& lse) {
  if (lse == minus_infinity) {
    lse = sink;
    return 0;
  }
  const float split = 1.0f / (1.0f + expf(sink - lse));
  lse = fmaxf(sink, lse) + log1pf(expf(-fabsf(sink - lse)));
  return split;
}

/// Writes 16 columns of a row of O. Four lanes hold 2 + 2 columns each; pairs of lanes exchange two, so that
/// each has 4 neighbouring columns and the four lanes fill 32 bytes. `row_gmem` points at the lane's own
/// columns.
template <typename T>
__device__ __forceinline__ void store_sixteen(std::byte* row_gmem, bool store, bool odd, std::uint32_t low,
                                              std::uint32_t high) {
  const std::uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  if (store) *reinterpret_cast<uint2*>(row_gmem) = odd ? uint2{other, high} : uint2{low, other};
}

/// Computes 1/rowsum, times dropout's scale and the sink's factor, for both rows; writes LSE.
template <ForwardConfig c>
__device__ __forceinline__ void finish_sums(const ForwardArguments& arguments, const WarpRows& rows,
                                            const Softmax<c>& softmax, float (&inverse)[2]) {
  const int lane = lane_now();
  const float sums[2] = {softmax.row_sum(0), softmax.row_sum(1)};
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = sums[half] == 0 ? 0.0f : __fdividef(1.0f, sums[half]);
  if (c.drops) {
    inverse[0] *= arguments.mask.dropout.keep_scale;
    inverse[1] *= arguments.mask.dropout.keep_scale;
  }
  if (!arguments.lse.wanted && !c.general) return;
  const bool upper = lane % 2 != 0;  // even lanes write row g, odd ones row g + 8
  float lse = softmax.lse(upper ? softmax.maximum[1] : softmax.maximum[0], upper ? sums[1] : sums[0],
                          arguments.scale_lse);
  if (c.general && rows.sink > minus_infinity) {
    const float split = join_sink(rows.sink, lse);
    inverse[0] *= __shfl_sync(~0u, split, lane & ~1);
    inverse[1] *= __shfl_sync(~0u, split, lane | 1);
  }
  if (lane % 4 < 2) rows.write_lse(arguments, lane / 4 + (upper ? 8 : 0), lse);
}

/// Rounds 16 columns of a warp's O and stores them in a panel of 16 rows by stmatrix. `row_smem` is the row
/// that the lane addresses.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void stage_sixteen(std::uint32_t row_smem, int n, const float (&inverse)[2],
                                              const Output<c>& o) {
  const int lane = lane_now();
  const std::uint32_t four[4] = {pack<T>(o[8 * n] * inverse[0], o[8 * n + 1] * inverse[0]),
                                 pack<T>(o[8 * n + 2] * inverse[1], o[8 * n + 3] * inverse[1]),
                                 pack<T>(o[8 * n + 4] * inverse[0], o[8 * n + 5] * inverse[0]),
                                 pack<T>(o[8 * n + 6] * inverse[1], o[8 * n + 7] * inverse[1])};
  const int chunk = (n % 4 * 2 + lane / 16) ^ (lane % 8);
  store_matrices(row_smem + chunk * 16, four);
}

/// Stores the 16 rows of a panel as the columns of O from `column` on. One lane starts a TMA store, for which
/// no warp waits here. If O has no tensor map, which is rare, the warp copies the rows, with code that is
/// short rather than fast.
__device__ __forceinline__ void send_panel(const ForwardArguments& arguments, const CUtensorMap& map,
                                           const WarpRows& rows, const std::byte* panel_smem, int column) {
  const int lane = lane_now();
  if (arguments.mapped_o) {
    if (lane == 0 && rows.count > 0) store_box(map, panel_smem, column, rows.query(0), rows.h, rows.b);
    return;
  }
#pragma unroll 1
  for (int row = 0; row < rows.count; ++row) {
    auto* to = reinterpret_cast<std::uint16_t*>(rows.row_of_o(arguments, row));
#pragma unroll 1
    for (int d = lane; d < min(arguments.dim_v - column, 64); d += 32) {
      const int chunk = d / 8 ^ row % 8;
      to[column + d] = reinterpret_cast<const std::uint16_t*>(panel_smem + row * 128 + chunk * 16)[d % 8];
    }
  }
}

/// Writes O through a Q stage in shared memory. Each warp uses its own 16 rows of the stage.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void stage_output(const ForwardArguments& arguments, const CUtensorMap& map,
                                             const WarpRows& rows, const float (&inverse)[2],
                                             const Output<c>& o, std::byte* rows_smem) {
  const int lane = lane_now();
  const auto place = static_cast<std::uint32_t>(__cvta_generic_to_shared(rows_smem)) + lane % 16 * 128;
#pragma unroll
  for (int n = 0; n < c.dim_v / 16; ++n) stage_sixteen<T, c>(place + n / 4 * (64 * 128), n, inverse, o);
  fence_async_proxy();
  __syncwarp();  // all lanes have stored and fenced their part of the rows, which one lane sends
#pragma unroll 1
  for (int panel = 0; panel < c.dim_v / 64; ++panel) {
    send_panel(arguments, map, rows, rows_smem + panel * (64 * 128), panel * 64);
  }
  if (lane == 0) commit_stores();
}

/// Writes O through two panels of the warp's own: one is filled while the other is stored.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void stage_output_by_panels(const ForwardArguments& arguments,
                                                       const CUtensorMap& map, const WarpRows& rows,
                                                       const float (&inverse)[2], const Output<c>& o,
                                                       std::byte* panels_smem) {
  constexpr int panel_bytes = 16 * 128;
  const int lane = lane_now();
  const auto place = static_cast<std::uint32_t>(__cvta_generic_to_shared(panels_smem)) + lane % 16 * 128;
#pragma unroll
  for (int panel = 0; panel < c.dim_v / 64; ++panel) {
    if (lane == 0) wait_stores_read<1>();
    __syncwarp();  // the store of the panel before the last has read this buffer
#pragma unroll
    for (int n = 4 * panel; n < 4 * panel + 4; ++n) {
      stage_sixteen<T, c>(place + panel % 2 * panel_bytes, n, inverse, o);
    }
    fence_async_proxy();
    __syncwarp();  // all lanes have stored and fenced their part of the panel, which one lane sends
    send_panel(arguments, map, rows, panels_smem + panel % 2 * panel_bytes, panel * 64);
    if (lane == 0) commit_stores();
  }
}

/// Writes O from registers to global memory. No thread waits for the stores.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void write_output(const ForwardArguments& arguments, const WarpRows& rows,
                                             const float (&inverse)[2], const Output<c>& o) {
  const int lane = lane_now();
  std::byte* const row_gmem[2] = {rows.row_of_o(arguments, lane / 4), rows.row_of_o(arguments, lane / 4 + 8)};
  const bool exists[2] = {lane / 4 < rows.count, lane / 4 + 8 < rows.count};
  if (arguments.aligned_o && arguments.dim_v % 4 == 0) {
    const int column = lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int n = 0; n < c.dim_v / 16; ++n) {
      const bool inside = n * 16 + column < arguments.dim_v;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* four = &o[8 * n + 2 * half];
        store_sixteen<T>(row_gmem[half] + (n * 16 + column) * 2, inside && exists[half], lane % 2 != 0,
                         pack<T>(four[0] * inverse[half], four[1] * inverse[half]),
                         pack<T>(four[4] * inverse[half], four[5] * inverse[half]));
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < c.dim_v / 2; ++n) {
      const int half = n / 2 % 2;
      const int column = n / 4 * 8 + lane % 4 * 2 + n % 2;
      if (exists[half] && column < arguments.dim_v) {
        reinterpret_cast<T*>(row_gmem[half])[column] = narrow<T>(o[n] * inverse[half]);
      }
    }
  }
}

/// Writes the partial O of a split, in f32, and its LSE.
template <ForwardConfig c>
__device__ __forceinline__ void write_split(const ForwardArguments& arguments, const WarpRows& rows,
                                            const Softmax<c>& softmax, const Output<c>& o) {
  const int lane = lane_now();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const float sum = softmax.row_sum(half);
    const float inverse = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
    if (lane % 4 == 0) {
      rows.write_lse_of_split(arguments.decode, row,
                              softmax.lse(softmax.maximum[half], sum, arguments.scale_lse));
    }
    if (row >= rows.count) continue;
    float* const row_gmem = rows.row_of_split(arguments.decode, row);
#pragma unroll
    for (int n = 0; n < c.dim_v / 8; ++n) {  // rows are padded to an even number of columns
      const int column = n * 8 + lane % 4 * 2;
      if (column < arguments.dim_v) {
        *reinterpret_cast<float2*>(row_gmem + column) = {o[4 * n + 2 * half] * inverse,
                                                         o[4 * n + 2 * half + 1] * inverse};
      }
    }
  }
}

/// Writes O = 0 and LSE of empty rows.
template <ForwardConfig c>
__device__ __forceinline__ void write_empty_rows(const ForwardArguments& arguments, const WarpRows& rows) {
  const int lane = lane_now();
  if (c.decode && arguments.decode.splits > 1) {
    if (lane < 16) rows.write_lse_of_split(arguments.decode, lane, minus_infinity);
    return;
  }
  if (lane < 16) rows.write_lse(arguments, lane, rows.sink);
#pragma unroll 1
  for (int row = 0; row < rows.count; ++row) {
    auto* to = reinterpret_cast<std::uint16_t*>(rows.row_of_o(arguments, row));
    for (int d = lane; d < arguments.dim_v; d += 32) to[d] = 0;
  }
}

}  // namespace tilewise::cuda::wgmma
