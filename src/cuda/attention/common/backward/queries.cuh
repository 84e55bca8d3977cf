#pragma once

#include "cuda/attention/common/backward/config.h"
#include "cuda/attention/common/backward/space.cuh"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Which keys a block keeps, and which queries it walks over.

/// From products to exponents of 2. Where the scale is 0, a number so small that it makes no difference to
/// any product but a hidden one's.
__device__ __forceinline__ float exponent_unit(double scale) {
  const auto unit = static_cast<float>(scale * 1.4426950408889634);
  return fabsf(unit) < 1e-30f ? 1e-30f : unit;
}

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
    Turns turns =
        Turns::of(call, call.problem.batch * call.problem.heads_kv, keys.tiles, head_bytes, multiprocessors);
    const QueryGrid queries = QueryGrid::of(call, c.queries);
    if (call.deterministic) {
      const std::int64_t walked = call.group() * queries.tiles / (Turns::uneven(call) ? 2 : 1);
      const std::int64_t wanted = ordered_section(std::int64_t{c.blocks} * multiprocessors, walked);
      turns.section =
          std::max(turns.section, static_cast<std::uint32_t>(std::min<std::int64_t>(wanted, turns.heads)));
    }
    turns.section = even_section(turns.heads, turns.section);
    return {keys, queries, turns};
  }

 private:
  /// Heads whose blocks begin alternately where they add to dq in order. A block comes to a tile of queries
  /// more than one tile after the block before it: so long should it be until it begins, for else it waits.
  /// Where `room` blocks run and each walks over so many tiles, room / walked of them begin in the time of
  /// one. Of short walks all heads are in the cache at once, and more of them would not fit.
  static constexpr std::int64_t ordered_section(std::int64_t room, std::int64_t walked) {
    const std::int64_t tiles_apart = walked < 16 ? 2 : 3;
    return (tiles_apart * room + walked - 1) / std::max<std::int64_t>(walked, 1);
  }
  /// About as many heads as wanted, but such that the last section is not short of them: its largest tiles
  /// come late, and few of them would leave most of the GPU idle at the end.
  static constexpr std::uint32_t even_section(std::uint32_t heads, std::uint32_t wanted) {
    if (wanted <= 1 || wanted >= heads) return wanted;
    const auto last = [&](std::uint32_t section) { return (heads - 1) % section + 1; };
    std::uint32_t best = wanted;
    for (std::uint32_t section = (3 * wanted + 3) / 4; section <= std::min(heads, (3 * wanted + 1) / 2);
         ++section) {
      if (last(section) * best > last(best) * section) best = section;
    }
    return best;
  }
};

/// What a block knows of the queries that see its keys. It lies in shared memory: registers are scarcer.
struct GroupFacts {
  const std::byte* q;  ///< of the group's first head and first query, as all of these
  const std::byte* d_o;
  std::int64_t row;  ///< where its values are
  std::int64_t low;  ///< keys that it sees, from and to, among those of the block
  std::int64_t high;
  std::int64_t tile;     ///< of the sums of dq
  int length;            ///< queries of a head
  int clear, clear_end;  ///< tiles of queries that see all keys, where tiles follow each other
  int share;             ///< which of the blocks that share the keys this is
  int head, at;          ///< where its share of the tiles begins: head of the group, tile
  int count;             ///< of them
  int from, to;          ///< tiles of each head, or where blocks keep an order heads of each tile

  /// With tiles of `size` queries and `keys` keys, both powers of two.
  template <int size, int keys>
  __device__ static GroupFacts of(const AttentionCall& call, const BackwardBlocks& blocks,
                                  const BackwardSpace& space, int b, int head_kv, int first_key,
                                  int key_count, int share) {
    GroupFacts facts;
    facts.set<size, keys>(call, blocks, space, b, head_kv, first_key, key_count, share);
    return facts;
  }

 private:
  template <int size, int keys>
  __device__ void set(const AttentionCall& call, const BackwardBlocks& blocks, const BackwardSpace& space,
                      int b, int head_kv, int first_key, int key_count, int share_) {
    const Sequence sequence = call.sequence(b);
    const std::int64_t first_head = head_kv * call.group();
    q = row_of_halves(call.q, b, first_head, sequence.first_q);
    d_o = row_of_halves(call.d_o, b, first_head, sequence.first_q);
    row = first_head * call.rows_q() + call.first_row_q(b);
    tile = first_head * space.dq.tiles + QuerySums::first_tile(call, b);
    // Queries i with i − left < the position of the keys' end, and i + right >= that of their beginning.
    const std::int64_t position = first_key - sequence.band_offset;
    low = -position - call.band.left;
    high = -position + call.band.right + 1;
    length = static_cast<int>(sequence.length_q);
    const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t end_query = min(sequence.length_q, position + key_count + call.band.left);
    const bool any = first_query < end_query;
    // Tiles of queries that may see some key.
    int first = any ? static_cast<int>(first_query / size) : 0;
    int end = any ? static_cast<int>((end_query + size - 1) / size) : 0;
    if (blocks.queries.tiles_per_block > 0) {
      first = 0;
      end = static_cast<int>(blocks.queries.tiles);
    }
    // Those whose first query sees the last key, and whose last one the first.
    constexpr std::int64_t far = 1 << 30;
    const auto tiles_of = [&](std::int64_t queries) {
      return static_cast<int>(max(std::int64_t{0}, min(far * size, queries)) / size);
    };
    clear = key_count < keys ? end : tiles_of(keys - high + size - 1);
    clear_end = tiles_of(1 - low);
    share = share_;
    head = 0;
    at = end - 1;
    count = any ? static_cast<int>(call.group()) * (end - first) : 0;
    from = first;
    to = end;
    if (space.order.kept()) {
      take_ordered_share(call, space.shares.count, any ? end - first : 0);
    } else if (space.shares.count > 1 && any) {
      const int tiles = end - first;
      const std::int64_t all = count;
      const auto begin = static_cast<int>(all * share / space.shares.count);
      count = static_cast<int>(all * (share + 1) / space.shares.count) - begin;
      head = begin / tiles;
      at = end - 1 - begin % tiles;
    }
  }
  /// Some heads, or a part of the tiles of one, of which the last `seen` see some key. Parts are cut alike
  /// for all keys that the last queries see, so that blocks that wait for each other are in step.
  __device__ void take_ordered_share(const AttentionCall& call, int shares, int seen) {
    const auto heads = static_cast<int>(call.group());
    const int end = to;
    from = 0;
    to = heads;
    int begin = 0, tiles = seen;
    if (shares <= heads) {
      from = heads * share / shares;
      to = heads * (share + 1) / shares;
    } else {
      const int parts = shares / heads;
      const int all = call.band.left >= Band::unbounded ? end : seen;
      from = share / parts;
      to = from + 1;
      begin = all * (share % parts) / parts;
      tiles = max(0, min(seen, all * (share % parts + 1) / parts) - begin);
    }
    head = from;
    at = end - 1 - begin;
    count = (to - from) * tiles;
  }
};

/// What a block has to say once it is done with a tile of queries (see Order).
struct HeldTile {
  std::uint32_t* flag = nullptr;
  std::uint32_t word = 0;
};

/// What a block keeps in shared memory.
struct BlockFacts {
  GroupFacts group;
  HeldTile held;
  std::uint32_t index;
};

static_assert(sizeof(BlockFacts) <= BackwardConfig::fact_bytes);

/// Walks over those queries a tile at a time, the last first: when a block comes to a tile, those of the keys
/// before have been there (see Order). Head by head of the group; or, where blocks keep an order, a tile of
/// each head after another: with causal a block of later keys sees fewer queries of each head, and would come
/// to the second ahead of all others, and wait for them.
struct QuerySteps {
  int at;
  int head = 0;
  int left = 0;                    ///< tiles that are to come, with this one
  std::int32_t tile = block_full;  ///< of the block mask

  __device__ bool more() const { return left > 0; }
  /// Tiles `from` to `to` of each head; or of heads `from` to `to` one tile each, where `by_heads`.
  __device__ void step(bool by_heads, int from, int to) {
    --left;
    if (by_heads) {
      if (++head < to) return;
      head = from;
      --at;
    } else {
      if (--at >= from) return;
      at = to - 1;
      ++head;
    }
  }
};

/// The words of Order: the block waits for the first, and leaves the second for the block after it.
struct OrderWords {
  std::uint32_t before, after;
};

/// The words by a block mask: how many blocks of keys before this one, and with it, meet a tile of queries. A
/// key block that is listed n times counts n times in both, so that nobody waits for a word that nobody
/// leaves. Not inlined, nor what follows: in the loop over tiles their registers would be missed.
inline __device__ __noinline__ OrderWords order_words(const AttentionCall& call, const KeyGrid& grid,
                                                      const QueryTile& queries, std::int64_t first_key) {
  const KeyRange any = queries.any(call);
  const std::int64_t size = call.blocks.block_k;
  const std::int64_t own = first_key / size;
  const std::int64_t row = queries.first / call.blocks.block_q;
  std::int64_t count = 0;
  std::uint32_t own_times = 0;
  const auto add = [&](std::int64_t block) {  // its tiles among the keys that are seen, and before this one
    if (block > own) return;
    if (block == own) ++own_times;
    const std::int64_t first = max(any.first, block * size) - block * size;
    const std::int64_t end = min(any.last, (block + 1) * size) - block * size;
    if (first >= end) return;
    const std::int64_t last = block == own ? (first_key - own * size) / grid.size : (end - 1) / grid.size + 1;
    count += last - first / grid.size;
  };
  const BlockView& blocks = call.blocks;
  const std::int32_t some = blocks.count(queries.b, queries.h, row);
  for (std::int32_t slot = 0; slot < some; ++slot) add(blocks.indices.at(queries.b, queries.h, row, slot));
  if (blocks.full_counts.data != nullptr) {
    const std::int32_t full = blocks.full_count(queries.b, queries.h, row);
    for (std::int32_t slot = 0; slot < full; ++slot) {
      add(blocks.full_indices.at(queries.b, queries.h, row, slot));
    }
  }
  const auto before = static_cast<std::uint32_t>(count);
  return {before, before + own_times};
}

/// The keys of a block, and the first of the query heads that share them.
struct OwnKeys {
  int b, first_head;
  int first, count;
};

/// With a block mask: the first of some tiles of queries, this one or a later one, that sees something of the
/// keys. Tiles have `size` queries.
inline __device__ __noinline__ QuerySteps next_seen(const AttentionCall& call, const BackwardBlocks& blocks,
                                                    const BackwardSpace& space, const GroupFacts& facts_smem,
                                                    const OwnKeys& keys, int size, QuerySteps steps) {
  const auto per_block = static_cast<int>(blocks.queries.tiles_per_block);
  const auto block_q = static_cast<int>(call.blocks.block_q);
  const std::int64_t key_block = keys.first / call.blocks.block_k;
  const SeenBlocks& seen = space.seen;
  const bool known = seen.bits != nullptr;
  const std::uint32_t* bits = known ? seen.of(call, keys.b, keys.first_head, key_block) : nullptr;
  const std::int64_t head_words = seen.key_blocks * seen.words;
  for (; steps.more(); steps.step(space.order.kept(), facts_smem.from, facts_smem.to)) {
    const int row = steps.at / per_block;
    if (known && (bits[steps.head * head_words + row / 32] >> row % 32 & 1u) == 0) continue;
    // Query r of the tile sees keys r + low to r + high.
    const int first = row * block_q + (steps.at - row * per_block) * size;
    const int count = min(size, min(facts_smem.length, (row + 1) * block_q) - first);
    const bool in_band =
        count > 0 && count - 1 + facts_smem.high + first > 0 && facts_smem.low + first < keys.count;
    if (!in_band) continue;
    steps.tile = known && call.blocks.tile_ids.data == nullptr
                     ? block_full
                     : block_state<true>(call, keys.b, keys.first_head + steps.head, row, key_block);
    if (steps.tile != block_hidden) break;
  }
  return steps;
}

}  // namespace tilewise::cuda::mma
