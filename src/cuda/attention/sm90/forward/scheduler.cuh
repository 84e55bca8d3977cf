#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/forward/packed.h"
#include "cuda/attention/sm90/forward/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// A block mask lists the key blocks of each row of query blocks: first those that may have a mask, then those
// in which everything is visible. Loaders and consumers take the K tiles of a work item in this order. The
// scheduler counts them beforehand, so that all roles agree on their number.

/// The lists of a work item. Counts, blocks and tile ids are brought into range, whatever they are.
struct BlockLists {
  /// The most slots of a list. Each block is listed once, so only garbage has more.
  static constexpr int most_slots = 1 << 24;

  const BlockArguments& blocks;
  const TileSpan seen;               ///< K tiles that the band leaves to the item
  const std::int32_t *some, *full;   ///< slot 0 of both lists
  const std::int32_t* ids;           ///< tile ids, parallel to `some`
  int count_of_some = 0, slots = 0;  ///< slots of `some`, and of both lists

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

  /// The first K tile of the block at a slot; −1 where the list has an invalid block number.
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

/// The number of K tiles in an item's lists, as a span that starts at 0. Called by a whole warp.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan listed_tiles(const BlockArguments& blocks, const WorkItem& item,
                                                 const TileSpan& seen) {
  if (item.more == 0 || seen.count() <= 0) return {};
  constexpr int most = 1 << 25;  // of a lane: more than there are K tiles, unless the lists are garbage
  const BlockLists lists(blocks, item, seen);
  int sum = 0;
  for (int slot = lane_now(); slot < lists.slots; slot += 32) {
    sum = min(sum + lists.tiles_from(lists.first_tile(slot)).count(), most);
  }
  return {0, __reduce_add_sync(~0u, sum)};
}

/// Walks over the K tiles in an item's lists.
class BlockWalk {
 public:
  __device__ __forceinline__ explicit BlockWalk(const BlockLists& lists) : lists_(lists) {}

  /// The next K tile. May be called as often as listed_tiles() says.
  __device__ __forceinline__ int next() {
    while (left_.count() <= 0 && slot_ + 1 < lists_.slots) {
      block_ = lists_.first_tile(++slot_);
      left_ = lists_.tiles_from(block_);
    }
    return left_.first++;
  }
  /// Whether the tile has a mask, the mask's id, and the first K tile of the block.
  __device__ __forceinline__ bool masked() const {
    return lists_.blocks.tiled && slot_ < lists_.count_of_some;
  }
  __device__ __forceinline__ int mask() const { return lists_.mask_of(slot_); }
  __device__ __forceinline__ int block() const { return block_; }

 private:
  const BlockLists& lists_;
  TileSpan left_;  // the remaining tiles of the block
  int slot_ = -1;
  int block_ = 0;
};

// Entries of a general call: their lengths are in memory, and packed ones are stored one after another.

/// Fills in a work item, except for what follows from its band. Returns false if it has no queries.
template <ForwardConfig c>
__device__ __forceinline__ bool find_item_of_entry(const ForwardArguments& arguments, const WorkTile& work,
                                                   WorkItem& found) {
  const GeneralArguments& general = arguments.general;
  const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
  const int number = c.decode ? work.tile / arguments.decode.splits : work.tile;
  int tile = number;
  found.more = c.decode ? 1 + work.tile % arguments.decode.splits : 1;
  found.band = arguments.band;
  int length_q = found.band.length_q;
  int length_k = found.band.length_k;
  if (general.packed) {
    found.h = work.head;
    const PackedTile own = PackedTile::of(general, number, c.rows() >> heads_log2, length_k);
    found.b = own.b;
    found.row_q = own.row_q;
    found.row_k = own.row_k;
    tile = own.number;
    length_q = own.length_q;
    length_k = own.length_k;
    if (own.b == general.batch) {  // no sequence owns the rows
      found.band.set_lengths(length_q, 0, general.alignment);
      found.first = tile * c.rows();
      found.sink = minus_infinity;
      return found.first < length_q << heads_log2;
    }
  } else {
    found.b = found.map_b = quotient(work.head, arguments.heads);
    found.h = work.head - found.b * arguments.heads;
  }
  if (general.key_lengths.data != nullptr) {
    length_k = max(0, min(general.key_lengths.at(found.b), length_k));
  }
  found.band.set_lengths(length_q, length_k, general.alignment);
  found.first = tile * c.rows();
  found.slope = general.alibi ? static_cast<float>(general.alibi_slopes.at(found.b, found.h)) : 0.0f;
  found.sink =
      general.sinks.data != nullptr ? static_cast<float>(general.sinks.at(found.b, found.h)) : minus_infinity;
  return found.first < length_q << heads_log2;
}

// The tile scheduler: how all warps of a CTA come to the same work items in the same order.

/// Draws the next tile index, counted over all CTAs from 0 on. The counter may hold anything before the
/// launch: its upper half says which launch it belongs to. The CTA that draws the last index clears it, so
/// that a graph can repeat the launch.
__device__ __forceinline__ int next_index(const TileCounter& counter, int last) {
  const auto mine = static_cast<unsigned long long>(counter.owner) << 32;
  unsigned long long found = atomicAdd(counter.word, 1ull);
  while (found >> 32 != counter.owner) {
    const unsigned long long before = atomicAdd(counter.word, 0ull);
    if (before >> 32 == counter.owner) {
      found = atomicAdd(counter.word, 1ull);
    } else if (atomicCAS(counter.word, before, mine | 1) == before) {
      found = mine;
    }
  }
  const int number = static_cast<int>(found & 0xFFFFFFFFu);
  if (number == last) atomicExch(counter.word, 0ull);
  return number;
}

/// Finds the work item of a tile index. False where there is none: packed sequences leave some indices
/// unused.
template <ForwardConfig c>
__device__ __forceinline__ bool find_item(const ForwardArguments& arguments, int number, WorkItem& found) {
  const WorkTile tile = arguments.schedule.work_tile(number);
  if constexpr (c.general) {
    return find_item_of_entry<c>(arguments, tile, found);
  } else {
    const bool one_entry = arguments.heads == arguments.schedule.heads;  // a division takes 100 clocks
    const int b = one_entry ? 0 : quotient(tile.head, arguments.heads);
    found = {.b = b, .h = tile.head - b * arguments.heads, .first = tile.tile * c.rows(), .more = 1};
    return true;
  }
}

/// K tiles that some of an entry's rows [begin, end) see a key of.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan tiles_of_rows(const BandOfKeys& band, int heads_log2, int begin,
                                                  int end) {
  return begin < end ? band.tiles(begin >> heads_log2, ((end - 1) >> heads_log2) + 1, c.keys) : TileSpan{};
}

/// The first of the 64 rows of an item that a consumer owns.
template <ForwardConfig c>
__device__ __forceinline__ int first_row_of(const ForwardArguments& arguments, const WorkItem& item,
                                            int consumer) {
  if constexpr (c.general) return item.first + 64 * consumer;
  return arguments.schedule.first_row(quotient(item.first, c.rows()), consumer, c.consumers,
                                      arguments.band.length_q);
}

/// K tiles that some row of an item sees. Where long and short rows are mixed, the first consumer's rows see
/// all of these tiles.
template <ForwardConfig c>
__device__ __forceinline__ TileSpan key_tiles_of(const ForwardArguments& arguments, const WorkItem& item) {
  const BandOfKeys& band = c.general ? item.band : arguments.band;
  const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
  const bool mixed = !c.general && arguments.schedule.mixed;
  const int begin = mixed ? first_row_of<c>(arguments, item, 0) : item.first;
  const int end = min(begin + (mixed ? 64 : c.rows()), band.length_q << heads_log2);
  const TileSpan all = tiles_of_rows<c>(band, heads_log2, begin, end);
  return c.decode ? all.split(item.more - 1, arguments.decode.splits) : all;
}

/// The number of K tiles after the first one that every consumer has in an item: the least over the
/// consumers.
template <ForwardConfig c>
__device__ __forceinline__ int common_steps(const ForwardArguments& arguments, const WorkItem& item) {
  const int own = first_row_of<c>(arguments, item, lane_now() % c.consumers);
  const int end = min(own + 64, arguments.band.length_q);
  const int seen = tiles_of_rows<c>(arguments.band, 0, own, end).count();
  const int tiles = c.blocks && seen > 0 ? item.loaded.count() : seen;
  return max(__reduce_min_sync(~0u, tiles - 1), 0);
}

// Padding: tiles before the first key that it shows and after the last one are left out.

/// The row of padding of an item, as PaddingArguments describes it. Null shows all keys. `hidden` is set
/// where none is shown.
__device__ __forceinline__ const std::byte* padding_row(const ForwardArguments& arguments,
                                                        const WorkItem& item, bool& hidden) {
  const PaddingArguments& padding = arguments.padding;
  hidden = false;
  if (!padding.listed) return padding.first + item.b * padding.stride_b;
  const BlockView& view = arguments.blocks.view;
  if (view.full_counts.data != nullptr) {
    const int count = view.full_count(item.b, item.h, 0);
    for (int slot = 0; slot < count; ++slot) {
      if (view.full_indices.at(item.b, item.h, 0, slot) == 0) return nullptr;
    }
  }
  const int count = view.count(item.b, item.h, 0);
  for (int slot = 0; slot < count; ++slot) {
    if (view.indices.at(item.b, item.h, 0, slot) != 0) continue;
    const std::int32_t tile = view.tile(item.b, item.h, 0, slot);
    return tile < 0 ? nullptr : view.tiles + tile * view.tile_stride[0];
  }
  hidden = true;
  return nullptr;
}

/// Cuts the K tiles of an item in shared memory to those from the first to the last one with a key that
/// padding shows. Called by a whole warp. It reads the item again, since the scheduler's registers are few.
template <ForwardConfig c>
__device__ __forceinline__ void cut_by_padding(const ForwardArguments& arguments, Barriers<c>& barriers,
                                               int stage) {
  WorkItem& item = barriers.items[stage];
  const std::byte* row = nullptr;
  if (arguments.padding.given() && item.more != 0) {
    bool hidden;
    row = padding_row(arguments, item, hidden);
    TileSpan tiles = hidden ? TileSpan{} : item.loaded;
    const int length_k = c.general ? item.band.length_k : arguments.band.length_k;
    const auto shows_any = [&](int tile) {
      bool shows = row == nullptr;
#pragma unroll
      for (int part = 0; part < c.keys; part += 32) {
        const int key = tile * c.keys + part + lane_now();
        if (key < length_k && row != nullptr) shows |= row[key * arguments.padding.stride_k] != std::byte{0};
      }
      return __any_sync(~0u, shows) != 0;
    };
#pragma unroll 1
    while (tiles.first < tiles.last && !shows_any(tiles.last - 1)) --tiles.last;
#pragma unroll 1
    while (tiles.first < tiles.last && !shows_any(tiles.first)) ++tiles.first;
    __syncwarp();  // all lanes have read the item
    const int lane = lane_now();
    if (lane < c.consumers) {
      TileSpan& seen = barriers.consumer_items[stage][lane].seen;
      seen = seen.cut(tiles);
    }
    if (lane == 0) item.loaded = tiles;
  }
  // Where the mask is the padding, it is applied as a mask.
  if constexpr (c.may_pad()) barriers.padding[stage] = arguments.padding.listed ? row : nullptr;
  __syncwarp();  // all lanes have written, and one lane then signals the item
}

/// Writes an item, or that there are no more, to shared memory. A whole warp does it: one lane for each
/// consumer, because one lane for all would take longer than a short item.
template <ForwardConfig c>
__device__ __forceinline__ void publish(const ForwardArguments& arguments, Barriers<c>& barriers, int stage,
                                        WorkItem item) {
  const BandOfKeys& band = c.general ? item.band : arguments.band;
  const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
  item.loaded = key_tiles_of<c>(arguments, item);
  if constexpr (c.blocks) item.loaded = listed_tiles<c>(arguments.blocks, item, item.loaded);
  if constexpr (c.ordered) barriers.steps[stage] = common_steps<c>(arguments, item);
  const int lane = lane_now();
  if (lane < c.consumers) {
    const int own = first_row_of<c>(arguments, item, lane);
    const int end = min(own + 64, band.length_q << heads_log2);
    TileSpan seen = tiles_of_rows<c>(band, heads_log2, own, end);
    if constexpr (c.decode) seen = seen.cut(item.loaded);
    if constexpr (c.blocks) seen = seen.count() > 0 ? item.loaded : TileSpan{};
    barriers.consumer_items[stage][lane] = {
        .first = own,
        .seen = seen,
        .whole = band.whole_tiles(own >> heads_log2, ((end - 1) >> heads_log2) + 1, c.keys)};
  }
  if (lane == 0) barriers.items[stage] = item;
  __syncwarp();  // all lanes have written their part of the item, which one lane then signals
  if constexpr (c.masked) cut_by_padding<c>(arguments, barriers, stage);
}

/// The scheduler warp. It publishes the next item while the other warps work on the one before. The first
/// item follows from blockIdx. After that a CTA either strides over the tiles or draws indices from a counter
/// until there are no more. It draws late, when the copies of all K tiles have been issued: a tile that is
/// drawn too early waits behind a long one while other CTAs run out of work.
template <ForwardConfig c>
struct TileScheduler {
  const ForwardArguments& arguments;
  Barriers<c>& barriers;
  int number = static_cast<int>(blockIdx.x);
  bool published = false;  ///< whether the item of that index has been published already

  /// Publishes the CTA's first item, before the mbarriers are initialised.
  __device__ __forceinline__ void publish_first() {
    WorkItem item{};
    published = number < arguments.schedule.total() && find_item<c>(arguments, number, item);
    if (published) publish<c>(arguments, barriers, 0, item);
  }

  __device__ __forceinline__ int next() const {
    const Schedule& schedule = arguments.schedule;
    if (!schedule.counted()) return number + schedule.blocks;
    int found = 0;
    if (lane_now() == 0) found = schedule.blocks + next_index(arguments.counter, schedule.total() - 1);
    return __shfl_sync(~0u, found, 0);
  }

  __device__ __forceinline__ void publish_all() {
    const Schedule& schedule = arguments.schedule;
    Ring<c.work_stages> ring;
    std::uint32_t parity = 0;  // of work_wanted
#pragma unroll 1
    while (true) {
      WorkItem item{};
      const bool more = number < schedule.total();
      if (published || !more || find_item<c>(arguments, number, item)) {
        if (!published) {
          wait(&barriers.work_empty[ring.stage()], ring.parity() ^ 1);
          publish<c>(arguments, barriers, ring.stage(), item);
        }
        published = false;
        if (lane_now() == 0) arrive(&barriers.work_full[ring.stage()]);
        ring.advance();
        if (more && schedule.counted()) {
          wait(&barriers.work_wanted, parity);
          parity ^= 1;
        }
      }
      if (!more) return;
      number = next();
    }
  }
};

/// Calls `body` with each item of the CTA in order. For one lane of a loader warp.
template <ForwardConfig c, typename Body>
__device__ __forceinline__ void for_each_item(const SharedMemory<c>& shared, const Body& body) {
  Barriers<c>& barriers = shared.barriers();
  Ring<c.work_stages> ring;
#pragma unroll 1
  while (true) {
    wait(&barriers.work_full[ring.stage()], ring.parity());
    const WorkItem item = barriers.items[ring.stage()];
    arrive(&barriers.work_empty[ring.stage()]);
    ring.advance();
    if (item.more == 0) return;
    body(item);
  }
}

}  // namespace tilewise::cuda::wgmma
