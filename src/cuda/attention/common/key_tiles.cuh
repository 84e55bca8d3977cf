#pragma once

#include "cuda/attention/common/turns.h"

namespace tilewise::cuda {

/// Consecutive keys that are computed together. `tile` is the block mask's tile that hides some of them, or
/// block_full.
struct KeyTile {
  std::int64_t first = 0;
  int count = 0;  ///< 0: no more tiles
  std::int32_t tile = block_full;
};

/// Queries [first, first + count) of entry b and head h, all in one row of query blocks.
struct QueryTile {
  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t first = 0;
  int count = 0;
  Sequence sequence;

  /// The keys that some query sees, and those that every query sees, by band and lengths.
  constexpr KeyRange any(const AttentionCall& call) const {
    return {call.keys_of(sequence, first).first, call.keys_of(sequence, first + count - 1).last};
  }
  constexpr KeyRange all(const AttentionCall& call) const {
    return {call.keys_of(sequence, first + count - 1).first, call.keys_of(sequence, first).last};
  }
};

/// How the queries of a head are cut into tiles that stay inside a row of query blocks.
struct QueryGrid {
  std::int64_t tiles = 0;            ///< per head
  std::int64_t tiles_per_block = 0;  ///< with a block mask
  int size = 0;

  static QueryGrid of(const AttentionCall& call, int size) {
    const std::int64_t length = call.problem.length_q;
    if (!call.problem.features.block_mask) return {(length + size - 1) / size, 0, size};
    const std::int64_t block = call.blocks.block_q;
    const std::int64_t per_block = (block + size - 1) / size;
    return {(length + block - 1) / block * per_block, per_block, size};
  }

  /// Tile `index`; its count is 0 where it has no queries.
  constexpr QueryTile tile(const AttentionCall& call, std::int64_t b, std::int64_t h,
                           std::int64_t index) const {
    QueryTile query{.b = b, .h = h, .first = index * size, .count = 0, .sequence = call.sequence(b)};
    std::int64_t end = query.sequence.length_q;
    if (tiles_per_block > 0) {
      const std::int64_t block = index / tiles_per_block;
      query.first = block * call.blocks.block_q + index % tiles_per_block * size;
      end = std::min(end, (block + 1) * call.blocks.block_q);
    }
    query.count =
        static_cast<int>(std::max<std::int64_t>(std::min<std::int64_t>(size, end - query.first), 0));
    return query;
  }
};

/// Reduces keys [first, last) to one of `splits` equal shares, in tiles of `size` keys.
__device__ __forceinline__ void keep_split_of(std::int64_t& first, std::int64_t& last, const int& size,
                                              int split, int splits) {
  const std::int64_t tiles = (last - first + size - 1) / size;
  const std::int64_t share = (tiles + splits - 1) / splits * size;
  first += split * share;
  last = min(last, first + share);
}

/// Walks over the key tiles, of at most `size` keys, that a query tile sees: those of one range or, with a
/// block mask, those of the blocks that it lists. `blocks`: the call may have a block mask.
template <bool blocks>
class KeyTiles;

template <>
class KeyTiles<false> {
 public:
  __device__ KeyTiles(const AttentionCall& call, const QueryTile& query, int size) : size_(size) {
    const KeyRange range = query.any(call);
    next_ = range.first;
    end_ = range.last;
  }
  /// Reduces the tiles to one of `splits` equal shares.
  __device__ void keep_split(int split, int splits) { keep_split_of(next_, end_, size_, split, splits); }
  __device__ KeyTile next() {
    if (next_ >= end_) return {};
    const KeyTile tile{next_, static_cast<int>(min(static_cast<std::int64_t>(size_), end_ - next_))};
    next_ += size_;
    return tile;
  }

 private:
  int size_;
  std::int64_t next_, end_;
};

template <>
class KeyTiles<true> {
 public:
  __device__ KeyTiles(const AttentionCall& call, const QueryTile& query, int size)
      : call_(call), b_(query.b), h_(query.h), size_(size), range_(query.any(call)) {
    if (!call.problem.features.block_mask) {
      next_ = range_.first;
      end_ = range_.last;
      lists_ = 0;
    } else {
      block_row_ = query.first / call.blocks.block_q;
      remaining_ = call.blocks.count(b_, h_, block_row_);
      lists_ = call.blocks.full_counts.data != nullptr ? 2 : 1;
    }
  }
  /// Reduces the tiles to one of `splits` equal shares. The call has no block mask.
  __device__ void keep_split(int split, int splits) { keep_split_of(next_, end_, size_, split, splits); }

  __device__ KeyTile next() {
    while (next_ >= end_) {
      if (!next_block()) return {};
    }
    const KeyTile tile{next_, static_cast<int>(min(static_cast<std::int64_t>(size_), end_ - next_)), tile_};
    next_ += size_;
    return tile;
  }

 private:
  // Moves on to the next listed block: first the blocks in which something is hidden, then the full ones.
  __device__ bool next_block() {
    while (lists_ > 0 && remaining_ == 0) {
      if (--lists_ == 0) return false;
      full_ = true;
      slot_ = 0;
      remaining_ = call_.blocks.full_count(b_, h_, block_row_);
    }
    if (lists_ == 0) return false;
    const BlockView& blocks = call_.blocks;
    const std::int64_t block = (full_ ? blocks.full_indices : blocks.indices).at(b_, h_, block_row_, slot_);
    tile_ = full_ ? block_full : blocks.tile(b_, h_, block_row_, slot_);
    // A listed block past the last key leaves an empty range.
    next_ = max(range_.first, block * blocks.block_k);
    end_ = min(range_.last, (block + 1) * blocks.block_k);
    ++slot_;
    --remaining_;
    return true;
  }

  const AttentionCall& call_;
  std::int64_t b_, h_;
  int size_;
  KeyRange range_;
  std::int64_t next_ = 0, end_ = 0;
  std::int64_t block_row_ = 0;
  std::int32_t tile_ = block_full;
  int lists_ = 0, slot_ = 0, remaining_ = 0;
  bool full_ = false;
};

/// Whether band, lengths or a block mask's tile hide key j of a key tile from query i.
__device__ __forceinline__ bool hidden(const AttentionCall& call, const Sequence& sequence,
                                       const KeyTile& keys, std::int64_t i, std::int64_t j) {
  const KeyRange range = call.keys_of(sequence, i);
  if (j < range.first || j >= range.last || j >= keys.first + keys.count) return true;
  return keys.tile >= 0 &&
         !call.blocks.tile_shows(keys.tile, i % call.blocks.block_q, j % call.blocks.block_k);
}

}  // namespace tilewise::cuda
