#pragma once

#include "cuda/attention/sm90/forward/block_lists.cuh"
#include "cuda/attention/sm90/forward/entries.cuh"
#include "cuda/attention/sm90/forward/pipeline.cuh"

namespace tilewise::cuda::wgmma {

// The tile scheduler: how all warps of a CTA come to the same work items in the same order.

/// Draws the next tile index of all CTAs, from 0 on. The counter may hold anything before the launch: its
/// upper half tells which launch it belongs to. Whoever draws the last index clears it, so that the launch
/// can be repeated in a graph.
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

/// How many K tiles after its first one every consumer has in an item: the least over the consumers.
template <ForwardConfig c>
__device__ __forceinline__ int common_steps(const ForwardArguments& arguments, const WorkItem& item) {
  const int own = first_row_of<c>(arguments, item, lane_now() % c.consumers);
  const int end = min(own + 64, arguments.band.length_q);
  const int seen = tiles_of_rows<c>(arguments.band, 0, own, end).count();
  const int tiles = c.blocks && seen > 0 ? item.loaded.count() : seen;
  return max(__reduce_min_sync(~0u, tiles - 1), 0);
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
  __syncwarp();  // the item is complete
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
