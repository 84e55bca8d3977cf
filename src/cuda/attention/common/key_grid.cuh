#pragma once

#include "cuda/attention/common/key_tiles.cuh"

namespace tilewise::cuda {

/// Which of `count` slots has a block, −1 where none has. Where a warp asks for the same, each of its lanes
/// looks at a slot of its own: one after another they would be waited for as long as a tile's products take.
template <bool by_warp, typename Index>
__device__ __forceinline__ int slot_of(int count, std::int64_t block, const Index& index) {
  constexpr int lanes = by_warp ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int first = 0; first < count; first += lanes) {
    const bool found = first + lane < count && index(first + lane) == block;
    if constexpr (by_warp) {
      if (const unsigned who = __ballot_sync(~0u, found); who != 0)
        return first + __ffs(static_cast<int>(who)) - 1;
    } else {
      if (found) return first;
    }
  }
  return -1;
}

/// What the block mask says of key block `kb` for the queries of block row `qb`.
template <bool by_warp>
__device__ __forceinline__ std::int32_t block_state(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                                    std::int64_t qb, std::int64_t kb) {
  const BlockView& blocks = call.blocks;
  if (blocks.full_counts.data != nullptr) {
    const auto index = [&](int slot) { return blocks.full_indices.at(b, h, qb, slot); };
    if (slot_of<by_warp>(blocks.full_count(b, h, qb), kb, index) >= 0) return block_full;
  }
  const auto index = [&](int slot) { return blocks.indices.at(b, h, qb, slot); };
  const int slot = slot_of<by_warp>(blocks.count(b, h, qb), kb, index);
  return slot < 0 ? block_hidden : blocks.tile(b, h, qb, slot);
}

/// Whether a query tile sees anything of a key tile that lies inside one key block; sets keys.tile. All lanes
/// of a warp ask for the same where `by_warp`.
template <bool by_warp>
__device__ __forceinline__ bool meets(const AttentionCall& call, const QueryTile& query, KeyTile& keys) {
  if (query.count <= 0) return false;
  const KeyRange any = query.any(call);
  if (keys.first >= any.last || keys.first + keys.count <= any.first) return false;
  keys.tile = block_full;
  if (!call.problem.features.block_mask) return true;
  keys.tile = block_state<by_warp>(call, query.b, query.h, query.first / call.blocks.block_q,
                                   keys.first / call.blocks.block_k);
  return keys.tile != block_hidden;
}

}  // namespace tilewise::cuda
