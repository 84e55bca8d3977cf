#pragma once

#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/swizzled_tile.cuh"
#include "cuda/wgmma/softmax.cuh"

namespace tilewise::cuda::wgmma {

/// A warp's 16 of a consumer's 64 queries.
struct WarpRows {
  int b, h;
  int first;  ///< query
  int count;  ///< of those that are there, 0 to 16

  __device__ WarpRows(const ForwardArguments& arguments, int b_, int h_, int first_)
      : b(b_), h(h_), first(first_), count(min(max(arguments.band.length_q - first_, 0), 16)) {}

  __device__ std::byte* row_of_o(const ForwardArguments& arguments, int row) const {
    return row_of_halves(arguments.o, b, h, first + row);
  }
  __device__ void write_lse(const ForwardArguments& arguments, int row, float lse) const {
    if (arguments.lse.wanted && row < count) {
      *reinterpret_cast<float*>(arguments.lse.at(b, h, first + row)) = lse;
    }
  }
};

/// Divides, and writes lse and o; o by way of the place of the consumer's queries, of which a warp takes its
/// own 16 rows, so that rows are written 16 bytes at a time.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void write_output(const ForwardArguments& arguments, const WarpRows& rows,
                                             const Softmax<c>& softmax, const Output<c>& o,
                                             std::byte* place_smem, int first_row) {
  const int lane = lane_now();
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.row_sum(half);
    inverse[half] = sum == 0 ? 0.0f : 1.0f / sum;
    if (lane % 4 == 0) {
      rows.write_lse(arguments, lane / 4 + 8 * half, softmax.lse(half, sum, arguments.scale));
    }
  }
  const auto chunk_at = [&](int row, int chunk) {  // of the warp's rows
    return (chunk / 8 * 64 + first_row + row) * 128 + (chunk % 8 ^ row % 8) * 16;
  };
  const auto place = static_cast<std::uint32_t>(__cvta_generic_to_shared(place_smem));
#pragma unroll
  for (int n = 0; n < c.dim_v / 16; ++n) {  // 16 columns: of rows g and g + 8, then columns + 8
    const std::uint32_t four[4] = {pack<T>(o[8 * n] * inverse[0], o[8 * n + 1] * inverse[0]),
                                   pack<T>(o[8 * n + 2] * inverse[1], o[8 * n + 3] * inverse[1]),
                                   pack<T>(o[8 * n + 4] * inverse[0], o[8 * n + 5] * inverse[0]),
                                   pack<T>(o[8 * n + 6] * inverse[1], o[8 * n + 7] * inverse[1])};
    store_matrices(place + chunk_at(lane % 16, 2 * n + lane / 16), four);
  }
  __syncwarp();  // the warp's rows are there
  constexpr int chunks = c.dim_v / 8;
#pragma unroll 4
  for (int index = lane; index < 16 * chunks; index += 32) {
    const int row = index / chunks;
    const int chunk = index % chunks;
    if (row >= rows.count || chunk * 8 >= arguments.dim_v) continue;
    store_eight(rows.row_of_o(arguments, row), chunk * 8, arguments.dim_v, arguments.aligned_o,
                *reinterpret_cast<const uint4*>(place_smem + chunk_at(row, chunk)));
  }
}

/// The same for rows that see nothing, without shared memory: nothing was loaded, and the place may be
/// another tile's.
__device__ __forceinline__ void write_nothing(const ForwardArguments& arguments, const WarpRows& rows) {
  const int lane = lane_now();
  if (lane < 16) rows.write_lse(arguments, lane, minus_infinity);
#pragma unroll 1
  for (int row = 0; row < rows.count; ++row) {
    auto* to = reinterpret_cast<std::uint16_t*>(rows.row_of_o(arguments, row));
    for (int d = lane; d < arguments.dim_v; d += 32) to[d] = 0;
  }
}

}  // namespace tilewise::cuda::wgmma
