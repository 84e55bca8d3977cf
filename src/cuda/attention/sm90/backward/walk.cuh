#pragma once

#include "cuda/attention/sm90/backward/config.h"
#include "cuda/attention/sm90/backward/params.h"

namespace tilewise::cuda::wgmma_backward {

/// The last sequence that starts at or before a tile. Sequence n starts with tile start(n) / rows + n, so
/// that each has tiles of its own, without a sum over lengths.
__device__ inline int sequence_of(const Starts& starts, int rows, std::int64_t tile) {
  std::int64_t low = 0, high = starts.sequences;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (starts.at(middle) / rows + middle <= tile ? low : high) = middle;
  }
  return static_cast<int>(low);
}

/// A batch entry or packed sequence.
struct Entry {
  int b;      ///< index in the batch
  int place;  ///< index in tensors: 0 for packed sequences, whose rows start at first_q and first_k
  int first_q, first_k;  ///< rows of its first query and key in tensors
  int length_q, length_k;
  int offset;  ///< query i stands at key i + offset

  __device__ static Entry of(const Sizes& sizes, int b) {
    Entry entry{.b = b,
                .place = b,
                .first_q = 0,
                .first_k = 0,
                .length_q = sizes.length_q,
                .length_k = sizes.length_k};
    if (sizes.packed) {
      entry.place = 0;
      entry.first_q = static_cast<int>(sizes.starts_q.at(b));
      entry.first_k = static_cast<int>(sizes.starts_k.at(b));
      entry.length_q = static_cast<int>(sizes.starts_q.length(b));
      entry.length_k = static_cast<int>(sizes.starts_k.length(b));
    } else if (sizes.key_lengths.data != nullptr) {
      entry.length_k = static_cast<int>(within(sizes.key_lengths.at(b), 0, sizes.length_k));
    }
    entry.offset = sizes.bottom_right ? entry.length_k - entry.length_q : 0;
    return entry;
  }

  /// The workspace's number of the entry's first query tile of a head.
  template <int queries>
  __device__ std::int64_t first_tile(const Sizes& sizes, int tiles, int head_q) const {
    return sizes.packed ? std::int64_t{head_q} * tiles + first_q / queries + b
                        : (std::int64_t{b} * sizes.heads_q + head_q) * tiles;
  }
};

/// A query tile, by its number in the workspace.
template <int queries>
struct QueryTile {
  Entry entry;
  int head_q;
  int tile;  ///< number in the entry

  __device__ QueryTile(const Sizes& sizes, int tiles, std::uint32_t number) {
    const auto of_head = static_cast<std::uint32_t>(tiles);  // 32 bits divide faster
    const int head = static_cast<int>(number / of_head);
    tile = static_cast<int>(number % of_head);
    const int b = sizes.packed ? sequence_of(sizes.starts_q, queries, tile) : head / sizes.heads_q;
    entry = Entry::of(sizes, b);
    head_q = sizes.packed ? head : head % sizes.heads_q;
    if (sizes.packed) tile -= entry.first_q / queries + b;
  }
  __device__ int first_query() const { return tile * queries; }
  /// Queries of the entry in the tile: 0 for tiles past its end and before the first sequence.
  __device__ int count() const { return tile < 0 ? 0 : max(0, min(queries, entry.length_q - first_query())); }
};

/// The keys of a CTA, and the tiles of queries that see any of them.
struct Walk {
  Entry entry;
  int head;       ///< index in dK and dV, where each split of a key head counts as a head
  int first_key;  ///< index in the entry
  int key_count;  ///< keys of the entry among the CTA's; the others are hidden
  int first_tile, end_tile;
  std::int64_t position;  ///< the query that stands at the first key

  template <Config c>
  __device__ static Walk of(const Sizes& sizes, const Turns& turns, unsigned index) {
    const Turn turn = turns.turn(index);
    const auto heads = static_cast<unsigned>(sizes.heads_kv * sizes.splits.count());
    Walk walk{};
    auto tile = static_cast<int>(turn.tile);
    int b = static_cast<int>(turn.head / heads);
    if (sizes.packed) {
      b = sequence_of(sizes.starts_k, c.keys, tile);
      tile -= static_cast<int>(sizes.starts_k.at(b)) / c.keys + b;
    }
    walk.entry = Entry::of(sizes, b);
    walk.head = static_cast<int>(turn.head % heads);
    walk.first_key = tile * c.keys;
    // No sequence owns the rows before the first one.
    walk.key_count = tile < 0 ? 0 : max(0, min(c.keys, walk.entry.length_k - walk.first_key));
    walk.position = std::int64_t{walk.first_key} - walk.entry.offset;
    const std::int64_t first = max(std::int64_t{0}, walk.position - sizes.right);
    const std::int64_t end =
        min(static_cast<std::int64_t>(walk.entry.length_q), walk.position + walk.key_count + sizes.left);
    const bool any = walk.key_count > 0 && first < end;
    walk.first_tile = any ? static_cast<int>(first / c.queries) : 0;
    walk.end_tile = any ? static_cast<int>((end + c.queries - 1) / c.queries) : 0;
    if (const int shares = sizes.splits.queries; shares > 1) {
      const int share = walk.head % shares, tiles = walk.end_tile - walk.first_tile;
      walk.end_tile = walk.first_tile + tiles * (share + 1) / shares;
      walk.first_tile += tiles * share / shares;
    }
    return walk;
  }
  // Divisions by 1, the usual number of splits, are left out: each takes a hundred clocks.
  __device__ int head_kv(const Sizes& sizes) const {
    return sizes.splits.count() == 1 ? head : head / sizes.splits.count();
  }
  __device__ int first_head_q(const Sizes& sizes) const {
    return (sizes.splits.queries == 1 ? head : head / sizes.splits.queries) * sizes.own_heads;
  }

  /// Number of rows of dK and dV that the CTA writes: including those past a key length, but not those of
  /// another sequence.
  template <Config c>
  __device__ int written(const Sizes& sizes) const {
    return sizes.packed ? key_count : min(c.keys, sizes.length_k - first_key);
  }

  /// The number of CTAs with earlier keys that compute a tile of queries: those from the first key that the
  /// tile's first query sees.
  template <Config c>
  __device__ std::uint32_t rank(const Sizes& sizes, int tile) const {
    const std::int64_t lowest = std::int64_t{tile} * c.queries + entry.offset - sizes.left;
    return static_cast<std::uint32_t>(first_key / c.keys - max(std::int64_t{0}, lowest) / c.keys);
  }
  /// The same, counting only CTAs whose key block the tile sees.
  template <Config c>
  __device__ std::uint32_t listed_rank(const Sizes& sizes, const BlockLists& blocks, int head_q,
                                       int tile) const {
    const int own = first_key / c.keys, first = own - static_cast<int>(rank<c>(sizes, tile));
    const int own_block = own / blocks.key_tiles, first_block = first / blocks.key_tiles;
    if (own_block == first_block) return static_cast<std::uint32_t>(own - first);
    const auto before = [&](int key_block) {
      return blocks
          .before[blocks.row(entry.b, head_q, key_block) * blocks.query_blocks + tile / blocks.query_tiles];
    };
    const bool sees_first = before(first_block + 1) > before(first_block);
    return static_cast<std::uint32_t>((before(own_block) - before(first_block)) * blocks.key_tiles +
                                      own % blocks.key_tiles - (sees_first ? first % blocks.key_tiles : 0));
  }
  template <Config c>
  __device__ std::uint32_t rank_in_walk(const Sizes& sizes, const BlockLists& blocks, int head_q,
                                        int tile) const {
    if constexpr (c.listed) {
      return listed_rank<c>(sizes, blocks, head_q, tile);
    } else {
      return rank<c>(sizes, tile);
    }
  }
};

/// Query r of a tile sees the CTA's keys [r + low, r + high).
struct Visible {
  int low, high;
  bool all;  ///< every query sees every key

  template <Config c>
  __device__ static Visible of(const Sizes& sizes, const Walk& walk, int tile) {
    return of<c>(sizes, walk, tile, walk.key_count == c.keys);
  }
  /// `whole`: all keys of the CTA are the entry's.
  template <Config c>
  __device__ static Visible of(const Sizes& sizes, const Walk& walk, int tile, bool whole) {
    constexpr std::int64_t far = 1 << 20;  // larger than any tile, and small enough that sums do not overflow
    const std::int64_t at = std::int64_t{tile} * c.queries - walk.position;
    const auto low = static_cast<int>(max(-far, min(far, at - sizes.left)));
    const auto high = static_cast<int>(max(-far, min(far, at + sizes.right + 1)));
    return {low, high, low + c.queries - 1 <= 0 && high >= c.keys && whole};
  }
};

}  // namespace tilewise::cuda::wgmma_backward
