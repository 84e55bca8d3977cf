#pragma once

#include "cuda/attention/sm90/backward/pairs.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce.cuh"

namespace tilewise::cuda::wgmma_backward {

// What pairs add to the gradients.

/// += pairsᵀ · rows, of 64 keys by all dims, from fragments in registers and queries' rows in shared memory.
template <typename T, int dim>
__device__ __forceinline__ void add_to_keys(float (&sums)[dim / 2], const Fragments& pairs,
                                            TileDescriptor rows, bool add) {
#pragma unroll
  for (int step = 0; step < Config::queries / 16; ++step) {
    WarpgroupProduct<T, dim>::from_registers(sums, pairs[step], rows + step * 128, add || step > 0);
  }
}

/// dq of a tile, 64 queries by 64 dims.
template <typename T>
__device__ __forceinline__ void start_dq(Pairs& dq, TileDescriptor dscores, TileDescriptor keys) {
#pragma unroll
  for (int step = 0; step < Config::keys / 16; ++step) {
    WarpgroupProduct<T, 64>::template from_shared<1, 1>(dq, dscores + step * 128, keys + step * 128,
                                                        step > 0);
  }
}

/// Each query's sum of score gradients over keys that are no peaks. Two warps that have time take half of the
/// keys each, and a lane two queries: products with ones would wait for all that is under way.
template <typename Block>
__device__ __forceinline__ void add_row_sums(const Block& block, const TileFacts& queries, int pair_stage,
                                             int part) {
  using T = typename Block::T;
  constexpr int keys = Config::keys / Config::sum_warps;
  const int lane = block.lane();
  const std::uint32_t first =
      Block::address(block.dscores_smem + pair_stage * Config::pair_bytes()) + part * (keys * 128) + lane * 4;
  float low = 0, high = 0;
#pragma unroll 1
  for (int row = 0; row < keys; row += 8) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      std::uint32_t two;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(two)
                   : "r"((first + row * 128 + n * 128) ^ (n * 16))
                   : "memory");
      const float2 both = unpack<T>(two);
      low += both.x;
      high += both.y;
    }
  }
  float* to = block.space.rows.rest + part * block.space.rows.count + queries.row + 2 * lane;
  if (2 * lane < queries.count) atomicAdd(to, low);
  if (2 * lane + 1 < queries.count) atomicAdd(to + 1, high);
}

/// dq's sums, of a warp's 16 queries, to where they wait to be added in global memory.
template <typename Block>
__device__ __forceinline__ void stage_dq(const Block& block, const Pairs& dq) {
  float* to = block.dq_smem + block.warp() * (8 * mma::QuerySums::fragment) + 4 * block.lane();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    *reinterpret_cast<float4*>(to + j * mma::QuerySums::fragment) = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                                                                     dq[4 * j + 3]};
  }
}
/// Has them added, by one lane. They are of eights of dims from `first_eight` on.
template <typename Block>
__device__ __forceinline__ void send_dq(const Block& block, const TileFacts& queries, int first_eight) {
  const mma::QuerySums& sums = block.space.dq;
  const int tile = block.warp() % 4;
  const int eights = min(8, sums.eights - first_eight);
  if (sums.data == nullptr || 16 * tile >= queries.count || eights <= 0) return;
  add_floats(sums.data + ((queries.sums + tile) * sums.eights + first_eight) * mma::QuerySums::fragment,
             block.dq_smem + block.warp() * (8 * mma::QuerySums::fragment),
             eights * mma::QuerySums::fragment * 4);
  commit_stores();
}

/// A lane's sums, times a factor, to a tile in shared memory.
template <typename Block, int n>
__device__ __forceinline__ void stage_own(const Block& block, std::byte* to_smem, const float (&sums)[n],
                                          float factor) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block.first_own_key() + block.lane() / 4 + 8 * half;
      *reinterpret_cast<std::uint32_t*>(to_smem + Block::KeyPanels::offset(row, j) + 4 * (block.lane() % 4)) =
          pack<typename Block::T>(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
    }
  }
}
template <typename Block>
__device__ __forceinline__ void store_rows(const Block& block, const Rows& rows, int dims,
                                           const std::byte* from_smem) {
  using Tile = typename Block::KeyPanels;
  if (!rows.wanted) return;
  std::byte* first = row_of_halves(rows, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < Config::keys * Tile::chunks;
       index += Config::consumer_threads()) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (row >= block.key_count() || chunk * 8 >= dims) continue;
    store_eight(first + row * rows.stride_s * 2, chunk * 8, dims, true,
                *reinterpret_cast<const uint4*>(from_smem + Tile::offset(row, chunk)));
  }
}
/// Rows that are still to be mended, in f32.
template <typename Block, int n>
__device__ __forceinline__ void store_unfinished(const Block& block, float* to, int dims,
                                                 const float (&sums)[n]) {
  if (to == nullptr) return;
  const std::int64_t first_row =
      BackwardSpace::key_row(block.call, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = block.first_own_key() + 8 * half + block.lane() / 4;
    if (r >= block.key_count() || block.has_peak_smem[r] == 0) continue;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = 8 * j + 2 * (block.lane() % 4) + e;
        if (d < dims) to[(first_row + r) * dims + d] = sums[4 * j + 2 * half + e];
      }
    }
  }
}
/// A share's sums of all rows.
template <typename Block, int n>
__device__ __forceinline__ void store_share(const Block& block, float* to, int dims, const float (&sums)[n]) {
  if (to == nullptr) return;
  const std::int64_t floats = mma::KeyShares::row_floats(dims);
  const std::int64_t first_row =
      block.facts_smem->group.share * block.space.shares.keys +
      BackwardSpace::key_row(block.call, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
  const int first_dim = 2 * (block.lane() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = block.first_own_key() + 8 * half + block.lane() / 4;
    if (r >= block.key_count()) continue;
    float* row = to + (first_row + r) * floats + first_dim;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      if (first_dim + 8 * j >= floats) continue;
      *reinterpret_cast<float2*>(row + 8 * j) = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
    }
  }
}

/// dk and dv from their sums; everyone is done with keys and values, and peaks are known.
template <typename Block, int n>
__device__ __forceinline__ void store_own(const Block& block, const float (&dk)[n], const float (&dv)[n]) {
  const BackwardSpace& space = block.space;
  const std::int64_t first =
      BackwardSpace::key_row(block.call, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
  const auto note_peaks = [&](std::uint8_t* to) {
    for (int r = static_cast<int>(threadIdx.x); r < block.key_count(); r += Config::consumer_threads()) {
      to[r] = static_cast<std::uint8_t>(block.has_peak_smem[r]);
    }
  };
  if (space.shares.count > 1) {
    note_peaks(space.shares.has_peak + block.facts_smem->group.share * space.shares.keys + first);
    store_share(block, space.shares.dk, block.dim_qk(), dk);
    store_share(block, space.shares.dv, block.dim_v(), dv);
    return;
  }
  constexpr float weight_unit = 1.0f / static_cast<float>(1 << mma::weight_bits<typename Block::T>);
  stage_own(block, block.k_smem, dk, static_cast<float>(block.call.scale) * block.facts_smem->scale.down);
  stage_own(block, block.v_smem, dv, weight_unit);
  if (space.key_has_peak != nullptr) note_peaks(space.key_has_peak + first);
  store_unfinished(block, space.dk, block.dim_qk(), dk);
  store_unfinished(block, space.dv, block.dim_v(), dv);
  sync_some<1, Config::consumer_threads()>();  // the rows are there
  store_rows(block, block.call.dk, block.dim_qk(), block.k_smem);
  store_rows(block, block.call.dv, block.dim_v(), block.v_smem);
}

}  // namespace tilewise::cuda::wgmma_backward
