#pragma once

#include "cuda/attention/sm90/backward/pairs.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/shared.cuh"

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

/// dk and dv from their sums; everyone is done with keys and values.
template <typename Block, int n>
__device__ __forceinline__ void store_own(const Block& block, const float (&dk)[n], const float (&dv)[n]) {
  const BackwardSpace& space = block.space;
  if (space.shares.count > 1) {
    store_share(block, space.shares.dk, block.dim_qk(), dk);
    store_share(block, space.shares.dv, block.dim_v(), dv);
    return;
  }
  constexpr float weight_unit = 1.0f / static_cast<float>(1 << mma::weight_bits<typename Block::T>);
  stage_own(block, block.k_smem, dk, static_cast<float>(block.call.scale) * block.facts_smem->scale.down);
  stage_own(block, block.v_smem, dv, weight_unit);
  sync_some<1, Config::consumer_threads()>();  // the rows are there
  store_rows(block, block.call.dk, block.dim_qk(), block.k_smem);
  store_rows(block, block.call.dv, block.dim_v(), block.v_smem);
}

}  // namespace tilewise::cuda::wgmma_backward
