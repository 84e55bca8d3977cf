#pragma once

#include "cuda/mma_f32/space.h"
#include "cuda/mma_f32/split.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma_f32 {

// Splitting keys and values, once for all queries that will meet them.

/// Eight numbers of a row from `first` on; zeros past `dims`.
__device__ __forceinline__ void load_eight(float (&to)[8], const float* row, int first, int dims,
                                           bool aligned) {
  if (aligned && first + 8 <= dims) {
    const float4 low = *reinterpret_cast<const float4*>(row + first);
    const float4 high = *reinterpret_cast<const float4*>(row + first + 4);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    return;
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) to[n] = first + n < dims ? row[first + n] : 0.0f;
}

/// Whether rows of f32 can be read 16 bytes at a time.
__host__ __device__ __forceinline__ bool aligned_fours(const Rows& rows) {
  const std::int64_t strides = (rows.stride_b | rows.stride_h | rows.stride_s) * 4;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return ((address | strides) & 15) == 0;
}

/// Eight numbers times a power of two as chunks of their parts; counts those that lose more than rounding
/// takes.
template <int parts>
__device__ __forceinline__ void split_eight(uint4 (&chunks)[parts], const float (&x)[8], float power,
                                            int& some, bool& much) {
  std::uint32_t words[parts][4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float first = x[2 * n] * power;
    const float second = x[2 * n + 1] * power;
    const Pair two = split_two(first, second);
    const float2 high = unpack<__half>(two.high);
    const float2 low = unpack<__half>(two.low);
    const Loss losses[2] = {loss_of<parts>(first, high.x, low.x), loss_of<parts>(second, high.y, low.y)};
#pragma unroll
    for (const Loss loss : losses) {
      some += loss != Loss::none ? 1 : 0;
      much |= loss == Loss::much;
    }
    words[0][n] = two.high;
    if constexpr (parts == 2) words[1][n] = two.low;
  }
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    chunks[part] = {words[part][0], words[part][1], words[part][2], words[part][3]};
  }
}

inline constexpr int prepare_threads = 256;

/// A block has a tile: of keys, or of values.
template <int dim, int keys, int parts>
__global__ void __launch_bounds__(prepare_threads)
    split_keys(const __grid_constant__ AttentionCall call, const SplitTiles tiles, const Unfit unfit) {
  using Tile = SwizzledTile<dim>;
  constexpr int lanes = Tile::chunks;               // of a row
  constexpr int step = prepare_threads / lanes;     // rows at a time
  constexpr int rounds = std::max(1, keys / step);
  const std::int64_t longest = tiles.longest(call);
  const bool values = blockIdx.x % 2 != 0;
  const std::int64_t index = blockIdx.x / 2;
  const std::int64_t tile = index % longest;
  const std::int64_t b = index / longest % call.problem.batch;
  const std::int64_t h = index / longest / call.problem.batch;
  const Sequence sequence = call.sequence(b);
  const std::int64_t first = tile * keys;
  if (first >= sequence.length_k) return;

  const Rows& rows = values ? call.v : call.k;
  const auto dims = static_cast<int>(values ? call.problem.dim_v : call.problem.dim_qk);
  const bool aligned = aligned_fours(rows);
  const int row = static_cast<int>(threadIdx.x) / lanes;
  const int chunk = static_cast<int>(threadIdx.x) % lanes;
  float x[rounds][8];
  float largest = 0;
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int r = row + round * step;
    const bool present = r < keys && first + r < sequence.length_k;
    const auto* from = reinterpret_cast<const float*>(
        rows.at(b, h, sequence.first_k + (present ? first + r : first)));
    load_eight(x[round], from, chunk * 8, present ? dims : 0, aligned);
#pragma unroll
    for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fabsf(x[round][n]));
  }
  __shared__ int bits;
  if (threadIdx.x == 0) bits = 0;
  __syncthreads();  // it is 0
  // Numbers that are not negative compare as their bits do.
  const int warp_largest = __reduce_max_sync(~0u, __float_as_int(largest));
  if (threadIdx.x % 32 == 0) atomicMax(&bits, warp_largest);
  __syncthreads();  // everyone's is in it
  const int exponent = exponent_for(__int_as_float(bits));
  const float power = power_of_two(exponent);

  const std::int64_t place = tiles.first(call, b, h) + tile;
  std::byte* to = (values ? tiles.v : tiles.k) + place * tiles.tile_bytes;
  int losses = 0;
  bool bad = false;
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int r = row + round * step;
    uint4 chunks[parts];
    int some = 0;
    split_eight<parts>(chunks, x[round], power, some, bad);
    if (r < keys) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        *reinterpret_cast<uint4*>(to + part * keys * Tile::row_bytes + Tile::offset(r, chunk)) = chunks[part];
      }
    }
    losses += some;
#pragma unroll
    for (int apart = lanes / 2; apart > 0; apart /= 2) some += __shfl_xor_sync(~0u, some, apart);
    bad |= some >= row_losses;
  }
  const int all_losses = __syncthreads_count(losses > 0);
  if (threadIdx.x == 0) (values ? tiles.v_exponents : tiles.k_exponents)[place] = exponent;
  if (bad || all_losses >= tile_losses || sequence.length_k < few_keys) unfit.keys[b * call.problem.heads_kv + h] = 1;
}

}  // namespace tilewise::cuda::mma_f32
