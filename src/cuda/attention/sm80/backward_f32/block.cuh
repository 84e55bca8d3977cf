#pragma once

#include "cuda/attention/common/f32/products.cuh"
#include "cuda/attention/common/f32/split_rows.cuh"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/sm80/backward_f32/space.h"
#include "cuda/attention/sm80/backward_f32/tuning.h"

namespace tilewise::cuda::mma_f32 {

/// Queries [first, last) of which some see a block's keys.
struct QueryRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
__device__ __forceinline__ QueryRange queries_of(const AttentionCall& call, const Sequence& s,
                                                 std::int64_t first_key, std::int64_t last_key) {
  const std::int64_t first = max(std::int64_t{0}, first_key - call.band.right - s.band_offset);
  const std::int64_t last = min(s.length_q, last_key + call.band.left - s.band_offset);
  return {first, max(first, last)};
}

/// A tile of queries that a block meets.
struct QueriesAt {
  std::int64_t hq;
  std::int64_t split;  ///< among the tiles that were split
  std::int64_t row;    ///< the first query's, among [Hq, rows_q]
  int first;           ///< query
};

/// What a block of backward keeps, and where; and how queries come to it.
template <auto c>
struct BackwardBlock {
  using PairTile = SwizzledTile<c.keys>;

  const AttentionCall& call;
  const BackwardSpace& space;
  const Sequence sequence;
  const std::int64_t b, h;  ///< of the keys
  const std::int64_t first_key;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;  ///< own_tiles x parts x [keys, dim]
  std::byte* v_smem;
  std::byte* stages_smem;  ///< 2 x (q, d_o), each parts x [queries, dim]
  std::byte* pairs_smem;   ///< parts x [own, queries]: score gradients
  float* values_smem;      ///< 2 x (3 x [queries], exponents of q and d_o, d_o's norm)
  float* sums_smem;        ///< warps x 2 x [queries]: of weights and of score gradients that are no peaks
  float* factors_smem;     ///< own_tiles: what products with a tile's keys are to be multiplied by
  ScaledSum<c> dk, dv;
  float v_norm = 0;
  int least_k_exponent = 126;
  int k_exponent = 0, v_exponent = 0;  ///< of the warp's own tile
  int whole_first, whole_last;         ///< queries that see all the block's keys

  __device__ BackwardBlock(const AttentionCall& call_, const BackwardSpace& space_, std::int64_t b_,
                           std::int64_t h_, std::int64_t first_key_, std::byte* shared)
      : call(call_),
        space(space_),
        sequence(call.sequence(b_)),
        b(b_),
        h(h_),
        first_key(first_key_),
        k_smem(shared),
        v_smem(k_smem + c.own_tiles() * c.tile_bytes()),
        stages_smem(v_smem + c.own_tiles() * c.tile_bytes()),
        pairs_smem(stages_smem + 4 * c.tile_bytes()),
        values_smem(reinterpret_cast<float*>(pairs_smem + c.parts * c.pair_part_bytes())),
        sums_smem(values_smem + 2 * c.stage_values),
        factors_smem(sums_smem + c.warps * 2 * c.keys) {
    const auto within = [](std::int64_t i) {
      return static_cast<int>(max(std::int64_t{-1}, min(i, std::int64_t{0x7fffffff})));
    };
    const std::int64_t last_key = first_key + c.own() - 1;
    whole_first = last_key < sequence.length_k
                      ? within(max(last_key - call.band.right - sequence.band_offset, std::int64_t{0}))
                      : 0x7fffffff;
    whole_last = within(first_key + call.band.left - sequence.band_offset);
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* q_stage(int stage) const { return stages_smem + 2 * stage * c.tile_bytes(); }
  __device__ std::byte* d_o_stage(int stage) const { return q_stage(stage) + c.tile_bytes(); }
  __device__ float* values_stage(int stage) const { return values_smem + stage * c.stage_values; }

  static __device__ void copy_tile(std::byte* to_smem, const std::byte* from, bool present) {
#pragma unroll
    for (int n = 0; n < c.tile_bytes() / 16; n += c.threads()) {
      const int chunk = (n + static_cast<int>(threadIdx.x)) * 16;
      copy_async_16(to_smem + chunk, present ? from + chunk : from, present);
    }
  }

  /// Keys and values of the block, and what is known of them.
  __device__ void load_own() {
    const std::int64_t first = space.k.first(call, b, h) + first_key / c.keys;
    for (int tile = 0; tile < c.own_tiles(); ++tile) {
      const bool present = first_key + tile * c.keys < sequence.length_k;
      const std::int64_t at = first + (present ? tile : 0);
      copy_tile(k_smem + tile * c.tile_bytes(), space.k.data + at * c.tile_bytes(), present);
      copy_tile(v_smem + tile * c.tile_bytes(), space.v.data + at * c.tile_bytes(), present);
      v_norm = fmaxf(v_norm, space.v.norms[at]);
      least_k_exponent = min(least_k_exponent, space.k.exponents[at]);
    }
    const auto exponent_at = [&](const SplitRows& rows, int tile) {
      const std::int64_t last = (sequence.length_k - 1) / c.keys - first_key / c.keys;
      return rows.exponents[first + min(std::int64_t{tile}, last)];
    };
    k_exponent = exponent_at(space.k, warp / 2);
    v_exponent = exponent_at(space.v, warp / 2);
    if (threadIdx.x < c.own_tiles()) {
      const int exponent = exponent_at(space.k, static_cast<int>(threadIdx.x));
      factors_smem[threadIdx.x] = power_of_two(max(least_k_exponent - exponent, -126));
    }
  }

  __device__ void load_queries(const QueriesAt& at, int stage) const {
    copy_tile(q_stage(stage), space.q.data + at.split * c.tile_bytes(), true);
    copy_tile(d_o_stage(stage), space.d_o.data + at.split * c.tile_bytes(), true);
    float* to = values_stage(stage) + warp * c.keys + lane;
    if (warp < 3) {
      const RowValues& rows = space.rows;
      const float* from = warp == 0 ? rows.top : warp == 1 ? rows.factor : rows.shift;
      if (at.first + lane < sequence.length_q) {
        copy_async_4(to, from + at.row + lane);
      } else {
        *to = warp == 0 ? __int_as_float(0x7f800000) : 0.0f;
      }
    } else if (warp == 3 && lane < 3) {
      const void* from = lane == 0   ? static_cast<const void*>(space.q.exponents + at.split)
                         : lane == 1 ? static_cast<const void*>(space.d_o.exponents + at.split)
                                     : space.d_o.norms + at.split;
      copy_async_4(to, static_cast<const float*>(from));
    }
  }

  /// What a warp's rows of a split tile of its own are: 16 of them.
  __device__ std::uint32_t own_rows(const std::byte* smem) const {
    return address(smem + warp / 2 * c.tile_bytes() + warp % 2 * 16 * c.row_bytes());
  }

  /// Two numbers of the lane's queries, eight queries n.
  __device__ float2 two_of(const float* values, int n) const {
    return *reinterpret_cast<const float2*>(values + 8 * n + 2 * (lane % 4));
  }
};

}  // namespace tilewise::cuda::mma_f32
