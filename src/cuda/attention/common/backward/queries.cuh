#pragma once

#include "cuda/attention/common/backward/config.h"
#include "cuda/attention/common/backward/space.cuh"
#include "cuda/attention/common/key_grid.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Which keys a CTA of the backward kernel keeps, and which queries it walks over.

/// Turns a product q·k into an exponent of 2. Where the scale is 0, this is a number so small that only a
/// hidden product's infinity shows in the result.
__device__ __forceinline__ float nonzero_scale_log2(double scale) {
  const auto unit = static_cast<float>(scale * 1.4426950408889634);
  return fabsf(unit) < 1e-30f ? 1e-30f : unit;
}

/// How a backward problem is cut into CTAs: one for each K tile and key head. With causal the first keys are
/// seen by the most queries.
struct BackwardGrid {
  KeyGrid keys;
  QueryGrid queries;
  Turns turns;

  std::int64_t count() const { return std::int64_t{turns.heads} * turns.tiles; }

  static BackwardGrid of(const AttentionCall& call, const BackwardConfig& c, int multiprocessors) {
    const KeyGrid keys = KeyGrid::of(call, c.keys);
    // Q, dO and the accumulator of dQ.
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
  /// How many heads' CTAs should start alternately where they add to dQ in order. A CTA comes to a Q tile
  /// more than one tile's time after the CTA before it, so it should start that much later, or it waits.
  /// Where `room` CTAs run at a time and each walks over `walked` tiles, room / walked of them start per
  /// tile's time. With short walks all heads are in the L2 at once, and more of them would not fit.
  static constexpr std::int64_t ordered_section(std::int64_t room, std::int64_t walked) {
    const std::int64_t tiles_apart = walked < 16 ? 2 : 3;
    return (tiles_apart * room + walked - 1) / std::max<std::int64_t>(walked, 1);
  }
  /// About `wanted` heads, but such that the last section is not much smaller than the others: its largest
  /// tiles come late, and if they were few, most of the GPU would be idle at the end.
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

/// What a CTA knows of the queries that see its keys. It is in shared memory because registers are scarcer.
struct GroupFacts {
  const std::byte* q;  ///< of the first query of the group's first head; so are d_o, row, low, high and tile
  const std::byte* d_o;
  std::int64_t row;  ///< among the row values
  std::int64_t low;  ///< the first query sees the keys [low, high) of the K tile
  std::int64_t high;
  std::int64_t tile;     ///< of dQ's accumulator
  int length;            ///< queries per head
  int clear, clear_end;  ///< Q tiles that see all keys, where tiles follow each other
  int share;             ///< the number of this CTA among those that share the keys
  int head, at;          ///< the first tile of the share: its head in the group, its index
  int count;             ///< Q tiles of the share
  int from, to;          ///< tiles of each head, or in order heads of each tile

  /// `size` queries per Q tile and `keys` keys per K tile, both powers of two.
  template <int size, int keys>
  __device__ static GroupFacts of(const AttentionCall& call, const BackwardGrid& grid,
                                  const BackwardSpace& space, int b, int head_kv, int first_key,
                                  int key_count, int share) {
    GroupFacts facts;
    facts.set<size, keys>(call, grid, space, b, head_kv, first_key, key_count, share);
    return facts;
  }

 private:
  template <int size, int keys>
  __device__ void set(const AttentionCall& call, const BackwardGrid& grid, const BackwardSpace& space, int b,
                      int head_kv, int first_key, int key_count, int share_) {
    const Sequence sequence = call.sequence(b);
    const std::int64_t first_head = head_kv * call.group();
    q = row_of_halves(call.q, b, first_head, sequence.first_q);
    d_o = row_of_halves(call.d_o, b, first_head, sequence.first_q);
    row = first_head * call.rows_q() + call.first_row_q(b);
    tile = first_head * space.dq.tiles + DqAccumulator::first_tile(call, b);
    // A query i sees some key if i − left < the position of the keys' end and i + right >= that of their
    // start.
    const std::int64_t position = first_key - sequence.band_offset;
    low = -position - call.band.left;
    high = -position + call.band.right + 1;
    length = static_cast<int>(sequence.length_q);
    const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t end_query = min(sequence.length_q, position + key_count + call.band.left);
    const bool any = first_query < end_query;
    // Q tiles in which a query may see some key.
    int first = any ? static_cast<int>(first_query / size) : 0;
    int end = any ? static_cast<int>((end_query + size - 1) / size) : 0;
    if (grid.queries.tiles_per_block > 0) {
      first = 0;
      end = static_cast<int>(grid.queries.tiles);
    }
    // Q tiles whose first query sees the last key, and whose last query sees the first key.
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
  /// Takes whole heads, or a range of the Q tiles of one head, of which the last `seen` see some key. The
  /// ranges are the same for all K tiles that the last queries see, so that CTAs that wait for one another
  /// stay in step.
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
      const int shares_per_head = shares / heads;
      const int all = call.band.left >= Band::unbounded ? end : seen;
      from = share / shares_per_head;
      to = from + 1;
      begin = all * (share % shares_per_head) / shares_per_head;
      tiles = max(0, min(seen, all * (share % shares_per_head + 1) / shares_per_head) - begin);
    }
    head = from;
    at = end - 1 - begin;
    count = (to - from) * tiles;
  }
};

/// The flag that a CTA raises when it is done with a Q tile (see Order).
struct HeldTile {
  std::uint32_t* flag = nullptr;
  std::uint32_t word = 0;
};

/// The facts of a CTA in shared memory.
struct CtaFacts {
  GroupFacts group;
  HeldTile held;
  std::uint32_t index;
};

static_assert(sizeof(CtaFacts) <= BackwardConfig::fact_bytes);

/// The walk over these queries, one Q tile at a time, the last one first: when a CTA comes to a tile, the
/// CTAs of the keys before have been there (see Order). It goes head by head of the group. Where CTAs add in
/// order, it goes through the same tile of all heads before the next tile: with causal a CTA of later keys
/// sees fewer queries of each head, so head by head it would come to the second head before all others and
/// wait for them.
struct QuerySteps {
  int at;
  int head = 0;
  int left = 0;                    ///< tiles still to come, this one included
  std::int32_t tile = block_full;  ///< the block mask's tile inside the blocks, or block_full

  __device__ bool more() const { return left > 0; }
  /// Advances through tiles [from, to) of each head; where `by_heads`, through heads [from, to) of each tile.
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

/// The values of a flag of Order: a CTA waits for `before` and then writes `after` for the next one.
struct OrderWords {
  std::uint32_t before, after;
};

/// The same with a block mask: the number of K tiles before this one, and with it, that meet a Q tile. A key
/// block that is listed n times counts n times in both, so that no CTA waits for a value that none writes.
/// This function and next_seen() are not inlined, because in the mainloop their registers would be missing.
inline __device__ __noinline__ OrderWords order_words(const AttentionCall& call, const KeyGrid& grid,
                                                      const QueryTile& queries, std::int64_t first_key) {
  const KeyRange any = queries.any(call);
  const std::int64_t size = call.blocks.block_k;
  const std::int64_t own = first_key / size;
  const std::int64_t row = queries.first / call.blocks.block_q;
  std::int64_t count = 0;
  std::uint32_t own_times = 0;
  const auto add =
      [&](std::int64_t block) {  // counts the block's K tiles that are seen and come before this one
        if (block > own) return;
        if (block == own) ++own_times;
        const std::int64_t first = max(any.first, block * size) - block * size;
        const std::int64_t end = min(any.last, (block + 1) * size) - block * size;
        if (first >= end) return;
        const std::int64_t last =
            block == own ? (first_key - own * size) / grid.size : (end - 1) / grid.size + 1;
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

/// The keys of a CTA, and the first of the query heads that share them.
struct OwnKeys {
  int b, first_head;
  int first, count;
};

/// With a block mask: the first Q tile, `steps` or a later one, that sees some of the keys. Q tiles have
/// `size` queries.
inline __device__ __noinline__ QuerySteps next_seen(const AttentionCall& call, const BackwardGrid& grid,
                                                    const BackwardSpace& space, const GroupFacts& facts_smem,
                                                    const OwnKeys& keys, int size, QuerySteps steps) {
  const auto per_block = static_cast<int>(grid.queries.tiles_per_block);
  const auto block_q = static_cast<int>(call.blocks.block_q);
  const std::int64_t key_block = keys.first / call.blocks.block_k;
  const SeenBlocks& seen = space.seen;
  const bool known = seen.bits != nullptr;
  const std::uint32_t* bits = known ? seen.of(call, keys.b, keys.first_head, key_block) : nullptr;
  const std::int64_t head_words = seen.key_blocks * seen.words;
  for (; steps.more(); steps.step(space.order.kept(), facts_smem.from, facts_smem.to)) {
    const int row = steps.at / per_block;
    if (known && (bits[steps.head * head_words + row / 32] >> row % 32 & 1u) == 0) continue;
    // Query r of the tile sees keys [r + low, r + high).
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
