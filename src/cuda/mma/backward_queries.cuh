#pragma once

#include "cuda/mma/backward_space.cuh"
#include "cuda/mma/backward_tuning.h"
#include "cuda/tile/key_grid.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Which keys a block keeps, and which queries it walks over.

/// How a problem is cut. With causal the first keys are seen by the most queries.
struct BackwardBlocks {
  KeyGrid keys;
  QueryGrid queries;
  Turns turns;

  std::int64_t count() const { return std::int64_t{turns.heads} * turns.tiles; }

  static BackwardBlocks of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
    const KeyGrid keys = KeyGrid::of(call, c.keys);
    // Queries, d_o and the sums of dq.
    const std::int64_t head_bytes =
        call.group() * call.problem.length_q * (6 * call.problem.dim_qk + 2 * call.problem.dim_v);
    return {
        keys, QueryGrid::of(call, c.queries),
        Turns::of(call, call.problem.batch * call.problem.heads_kv, keys.tiles, head_bytes, multiprocessors)};
  }
};

/// What a block knows of the queries that see its keys. It lies in shared memory: registers are scarcer.
struct GroupFacts {
  const std::byte* q;  ///< of the group's first head and first query, as all of these
  const std::byte* d_o;
  std::int64_t row;  ///< where its values are
  std::int64_t low;  ///< keys that it sees, from and to, among those of the block
  std::int64_t high;
  std::int64_t tile;  ///< of the sums of dq
  int length;         ///< queries of a head
  int first, end;     ///< tiles of queries that may see some key
  int share;          ///< which of the blocks that share the keys this is
  struct Place {
    int head;  ///< of the group
    int at;    ///< tile of queries
  } begin, stop;  ///< the block's share of them: where it begins, and what comes after its last

  __device__ GroupFacts(const AttentionCall& call, const BackwardBlocks& blocks, const BackwardSpace& space,
                        int b, int head_kv, int first_key, int key_count, int share_) {
    const Sequence sequence = call.sequence(b);
    const std::int64_t head = head_kv * call.group();
    q = row_of_halves(call.q, b, head, sequence.first_q);
    d_o = row_of_halves(call.d_o, b, head, sequence.first_q);
    row = head * call.rows_q() + call.first_row_q(b);
    tile = head * space.dq.tiles + QuerySums::first_tile(call, b);
    // Queries i with i − left < the position of the keys' end, and i + right >= that of their beginning.
    const std::int64_t position = first_key - sequence.band_offset;
    low = -position - call.band.left;
    high = -position + call.band.right + 1;
    length = static_cast<int>(sequence.length_q);
    const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t end_query = min(sequence.length_q, position + key_count + call.band.left);
    const bool any = first_query < end_query;
    const int size = blocks.queries.size;
    first = any ? static_cast<int>(first_query / size) : 0;
    end = any ? static_cast<int>((end_query + size - 1) / size) : 0;
    if (blocks.queries.tiles_per_block > 0) {
      first = 0;
      end = static_cast<int>(blocks.queries.tiles);
    }
    share = share_;
    const auto heads = static_cast<int>(call.group());
    begin = {0, end - 1};
    stop = {any ? heads : 0, end - 1};
    if (space.shares.count > 1 && any) {
      begin = place(heads, share, space.shares.count);
      stop = place(heads, share + 1, space.shares.count);
    }
  }

 private:
  /// Where a share begins, of the tiles of all heads in their order.
  __device__ Place place(int heads, int share_, int shares) const {
    const int tiles = end - first;
    const auto at = static_cast<int>(std::int64_t{heads} * tiles * share_ / shares);
    return {at / tiles, end - 1 - at % tiles};
  }
};

/// What a block has to say once it is done with a tile of queries (see Order).
struct OpenTurn {
  std::uint32_t* flag = nullptr;
  std::uint32_t word = 0;
};

/// What a block keeps in shared memory.
struct BlockFacts {
  GroupFacts group;
  OpenTurn turn;
  std::uint32_t index;
};

static_assert(sizeof(BlockFacts) <= BackwardConfig::fact_bytes);

/// Walks over those queries a tile at a time, head by head of the group, the last queries of each first: when
/// a block comes to a tile, those of the keys before have been there (see Order).
struct QuerySteps {
  int at;
  int head = 0;
  std::int32_t tile = block_full;  ///< of the block mask

  __device__ static QuerySteps first(const GroupFacts& facts) { return {facts.begin.at, facts.begin.head}; }
  /// What comes after the last.
  __device__ static QuerySteps none(const GroupFacts& facts) { return {facts.stop.at, facts.stop.head}; }
  __device__ bool more(const GroupFacts& facts) const {
    return head != facts.stop.head || at != facts.stop.at;
  }
  __device__ void step(const GroupFacts& facts) {
    if (--at >= facts.first) return;
    at = facts.end - 1;
    ++head;
  }
};

/// How many blocks of keys before this one meet a tile of queries by a block mask. Not inlined, nor what
/// follows: in the loop over tiles their registers would be missed.
inline __device__ __noinline__ std::uint32_t blocks_before(const AttentionCall& call, const KeyGrid& grid,
                                                           const QueryTile& queries, std::int64_t first_key) {
  const KeyRange any = queries.any(call);
  const std::int64_t size = call.blocks.block_k;
  const std::int64_t own = first_key / size;
  const std::int64_t row = queries.first / call.blocks.block_q;
  std::int64_t count = 0;
  const auto add = [&](std::int64_t block) {  // its tiles among the keys that are seen, and before this one
    if (block > own) return;
    const std::int64_t first = max(any.first, block * size) - block * size;
    const std::int64_t end = min(any.last, (block + 1) * size) - block * size;
    if (first >= end) return;
    const std::int64_t last = block == own ? (first_key - own * size) / grid.size : (end - 1) / grid.size + 1;
    count += last - first / grid.size;
  };
  const BlockView& blocks = call.blocks;
  for (int slot = 0; slot < blocks.counts.at(queries.b, queries.h, row); ++slot) {
    add(blocks.indices.at(queries.b, queries.h, row, slot));
  }
  if (blocks.full_counts.data != nullptr) {
    for (int slot = 0; slot < blocks.full_counts.at(queries.b, queries.h, row); ++slot) {
      add(blocks.full_indices.at(queries.b, queries.h, row, slot));
    }
  }
  return static_cast<std::uint32_t>(count);
}

/// What a block mask hides of a tile of keys from a tile of queries: see KeyTile.
inline __device__ __noinline__ std::int32_t state_of(const AttentionCall& call, const QueryTile& queries,
                                                     KeyTile keys) {
  return meets(call, queries, keys) ? keys.tile : block_hidden;
}

}  // namespace tilewise::cuda::mma
