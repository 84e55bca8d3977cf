#pragma once

#include "cuda/attention/common/key_tiles.cuh"

namespace tilewise::cuda {

/// The slot, of `count`, that lists a block, or −1 where none does. Where all lanes of a warp ask for the
/// same, each looks at another slot: one after another, these loads would take as long as a tile's products.
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

/// What the block mask says of key block `kb` for the queries of block row `qb`: its tile, or that it is full
/// or hidden.
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

/// Whether a query tile sees some of a key tile that is inside one key block; sets keys.tile. With `by_warp`
/// all lanes of a warp ask for the same tiles.
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

/// How the keys of a head are cut into tiles that stay inside a key block.
struct KeyGrid {
  std::int64_t tiles = 0;
  std::int64_t tiles_per_block = 0;  ///< with a block mask
  int size = 0;

  static KeyGrid of(const AttentionCall& call, int size) {
    const std::int64_t length = call.problem.length_k;
    if (!call.problem.features.block_mask) return {(length + size - 1) / size, 0, size};
    const std::int64_t block = call.blocks.block_k;
    const std::int64_t per_block = (block + size - 1) / size;
    return {(length + block - 1) / block * per_block, per_block, size};
  }

  constexpr KeyTile tile(const AttentionCall& call, const Sequence& sequence, std::int64_t index) const {
    KeyTile keys{.first = index * size, .count = 0, .tile = block_full};
    std::int64_t end = sequence.length_k;
    if (tiles_per_block > 0) {
      const std::int64_t block = index / tiles_per_block;
      keys.first = block * call.blocks.block_k + index % tiles_per_block * size;
      end = std::min(end, (block + 1) * call.blocks.block_k);
    }
    keys.count = static_cast<int>(std::max<std::int64_t>(std::min<std::int64_t>(size, end - keys.first), 0));
    return keys;
  }
};

}  // namespace tilewise::cuda
