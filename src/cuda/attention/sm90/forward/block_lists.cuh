#pragma once

#include "cuda/attention/sm90/forward/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// A block mask lists the key blocks of each row of query blocks: first those that may have a mask, then those
// in which everything is visible. Loaders and consumers take the K tiles of a work item in this order. The
// scheduler counts them beforehand, so that all roles agree on their number.

/// The lists of a work item. Counts, blocks and tile ids are brought into range, whatever they are.
struct BlockLists {
  /// Of a list. Each block is listed once, so that no list has more, unless its numbers are garbage.
  static constexpr int most_slots = 1 << 24;

  const BlockArguments& blocks;
  const TileSpan seen;               ///< K tiles that the band leaves to the item
  const std::int32_t *some, *full;   ///< slot 0 of both lists
  const std::int32_t* ids;           ///< tile ids, beside `some`
  int count_of_some = 0, slots = 0;  ///< `slots` are those of both lists

  __device__ __forceinline__ BlockLists(const BlockArguments& blocks_, const WorkItem& item,
                                        const TileSpan& seen_)
      : blocks(blocks_), seen(seen_) {
    const BlockView& view = blocks.view;
    const int row = quotient(item.first, blocks.queries);
    const auto first_slot = [&](const Indices& list) {
      return list.data + item.b * list.stride[0] + item.h * list.stride[1] + row * list.stride[2];
    };
    some = first_slot(view.indices);
    full = first_slot(view.full_indices);
    ids = first_slot(view.tile_ids);
    count_of_some = min(view.count(item.b, item.h, row), most_slots);
    slots = count_of_some;
    if (view.full_counts.data != nullptr) slots += min(view.full_count(item.b, item.h, row), most_slots);
  }

  /// The first K tile of the block at a slot; −1 where the list has a number that is no block's.
  __device__ __forceinline__ int first_tile(int slot) const {
    const int block = slot < count_of_some
                          ? some[slot * blocks.view.indices.stride[3]]
                          : full[(slot - count_of_some) * blocks.view.full_indices.stride[3]];
    return block >= 0 && block < blocks.key_blocks ? block * blocks.tiles : -1;
  }
  /// The K tiles of a block that the band leaves to the item.
  __device__ __forceinline__ TileSpan tiles_from(int first) const {
    return first < 0 ? TileSpan{} : TileSpan{first, first + blocks.tiles}.cut(seen);
  }
  /// The tile that says what is visible in the block at a slot below `count_of_some`.
  __device__ __forceinline__ int mask_of(int slot) const {
    const int id = ids[slot * blocks.view.tile_ids.stride[3]];
    return static_cast<int>(within(id, 0, blocks.view.tile_count - 1));
  }
};

/// How many K tiles the lists of an item have, as a span from 0 on. For a whole warp.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan listed_tiles(const BlockArguments& blocks, const WorkItem& item,
                                                 const TileSpan& seen) {
  if (item.more == 0 || seen.count() <= 0) return {};
  constexpr int most = 1 << 25;  // a lane's: more than there are K tiles, unless the lists are garbage
  const BlockLists lists(blocks, item, seen);
  int sum = 0;
  for (int slot = lane_now(); slot < lists.slots; slot += 32) {
    sum = min(sum + lists.tiles_from(lists.first_tile(slot)).count(), most);
  }
  return {0, __reduce_add_sync(~0u, sum)};
}

/// Goes through the K tiles that the lists of an item have.
class BlockWalk {
 public:
  __device__ __forceinline__ explicit BlockWalk(const BlockLists& lists) : lists_(lists) {}

  /// The next K tile. There is one as often as listed_tiles() says.
  __device__ __forceinline__ int next() {
    while (left_.count() <= 0 && slot_ + 1 < lists_.slots) {
      block_ = lists_.first_tile(++slot_);
      left_ = lists_.tiles_from(block_);
    }
    return left_.first++;
  }
  /// Whether it has a mask, which mask that is, and the first K tile of the block.
  __device__ __forceinline__ bool masked() const {
    return lists_.blocks.tiled && slot_ < lists_.count_of_some;
  }
  __device__ __forceinline__ int mask() const { return lists_.mask_of(slot_); }
  __device__ __forceinline__ int block() const { return block_; }

 private:
  const BlockLists& lists_;
  TileSpan left_;  // of the block
  int slot_ = -1;
  int block_ = 0;
};

}  // namespace tilewise::cuda::wgmma
