#pragma once

#include "cuda/attention/sm90/forward/dropout.cuh"
#include "cuda/attention/sm90/forward/loaders.cuh"
#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/attention/sm90/forward/odd_mask.cuh"
#include "cuda/attention/sm90/forward/output.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"

namespace tilewise::cuda::wgmma {

/// A consumer warpgroup. It owns 64 query rows of each work item of the CTA and keeps S, P and O of these
/// rows in registers. Tensor cores compute S = Q·Kᵀ of K tile n and add P·V of tile n + 1, which came before
/// it, while the other consumers compute their softmax:
///
///   S[n]        start ── wait ─ mask ─ raise maxima ─ exponentiate ──── round to P
///   O += P·V[n+1]    start ──────────────────────────────────── wait ─ rescale O
///
/// K tiles are walked from the last to the first. A consumer skips tiles that none of its rows sees: it waits
/// for them and releases them unread. The pipeline does not drain between work items: the first S of the next
/// item is computed while O of this one is written.
template <typename T, ForwardConfig c>
struct Consumer {
  const ArgumentsOf<c.combined()>& arguments;
  const CUtensorMap& map_o;
  const SharedMemory<c>& shared;
  Barriers<c>& barriers;
  const int index;                              ///< of this consumer
  const int first_row;                          ///< of this warp among the consumer's 64
  const TileDescriptor q_tile, k_tile, v_tile;  ///< of stage 0
  Ring<c.q_stages, c.consumers> q, q_staged;
  Ring<c.stages> k, v;
  Ring<c.work_stages> item;
  Ring<c.mask_stages> mask;

  Scores<c> s;
  Probabilities<c> p;
  Output<c> o;
  Softmax<c> softmax;
  KeptScores kept;                 ///< elements of P that dropout keeps
  std::byte padding[c.keys / 32];  ///< of keys n + lane, where padding comes beside a mask
  int listed;                      ///< the K tile of S, as the loader gave it, where a block mask lists them

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  __device__ __forceinline__ Consumer(const ArgumentsOf<c.combined()>& arguments_, const CUtensorMap& map_o_,
                                      const SharedMemory<c>& shared_, int index_, int warp)
      : arguments(arguments_),
        map_o(map_o_),
        shared(shared_),
        barriers(shared_.barriers()),
        index(index_),
        first_row(warp * 16),
        q_tile(describe_tile(address(shared_.queries(0)), 0)),
        k_tile(describe_tile(address(shared_.keys(0)), 0)),
        v_tile(describe_tile(address(shared_.values(0)), c.keys * 128)),
        q(index_),
        softmax(arguments_.scale_log2) {
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) s[n] = 0;
#pragma unroll
    for (int n = 0; n < c.dim_v / 2; ++n) o[n] = 0;
  }

  /// One lane arrives for its warp.
  static __device__ __forceinline__ void release(Mbarrier* empty) {
    if (threadIdx.x % 32 == 0) arrive(empty);
  }
  __device__ __forceinline__ void release_queries() {
    release(&barriers.q_empty[q.stage()]);
    q.advance();
  }
  __device__ __forceinline__ void release_keys() {
    release(&barriers.k_empty[k.stage()]);
    k.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(&barriers.v_empty[v.stage()]);
    v.advance();
  }
  // Skipping a tile releases it unread. It must be waited for first, so that the arrival counts for its
  // phase.
  __device__ __forceinline__ void skip_keys(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers.k_full[k.stage()], k.parity());
      release_keys();
    }
  }
  __device__ __forceinline__ void skip_values(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers.v_full[v.stage()], v.parity());
      release_values();
    }
  }
  /// K and V of each tile alternately, the order in which the other consumers release them.
  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      skip_keys(1);
      skip_values(1);
    }
  }

  __device__ __forceinline__ void wait_for_keys() { wait(&barriers.k_full[k.stage()], k.parity()); }
  __device__ __forceinline__ void wait_for_values() { wait(&barriers.v_full[v.stage()], v.parity()); }
  template <bool waits = true>
  __device__ __forceinline__ void start_scores_of_next_keys() {
    if (waits) wait_for_keys();
    start_scores<T, c>(s, q_tile + q.stage() * (c.query_bytes() / 16),
                       k_tile + k.stage() * (c.key_bytes() / 16));
  }
  /// Starts O += P·V, or O = P·V where not `add`.
  template <bool waits = true>
  __device__ __forceinline__ void start_output_of_next_values(bool add) {
    if (waits) wait_for_values();
    start_output<T, c>(o, p, v_tile + v.stage() * (c.value_bytes() / 16), add);
  }

  /// The current work item, as far as it concerns this consumer.
  struct Work {
    bool more;       ///< false: there are no further items
    int first;       ///< of this consumer's rows
    TileSpan seen;   ///< K tiles that some of these rows see a key of
    TileSpan whole;  ///< K tiles of which all of these rows see all keys: they need no mask
  };
  /// Waits until the scheduler has published the current item.
  __device__ __forceinline__ Work current_work() {
    wait(&barriers.work_full[item.stage()], item.parity());
    const WorkItem& published = barriers.items[item.stage()];
    const ConsumerItem own = barriers.consumer_items[item.stage()][index];
    return {published.more != 0, own.first, own.seen, own.whole};
  }
  /// K tiles of the item that are loaded for other consumers alone: before the first that this one sees, and
  /// after its last.
  __device__ __forceinline__ int tiles_before() const {
    return barriers.items[item.stage()].loaded.last - barriers.consumer_items[item.stage()][index].seen.last;
  }
  __device__ __forceinline__ int tiles_after() const {
    return barriers.consumer_items[item.stage()][index].seen.first -
           barriers.items[item.stage()].loaded.first;
  }
  __device__ __forceinline__ const BandOfKeys& band_of(const Ring<c.work_stages>& at) const {
    if constexpr (c.general) return barriers.items[at.stage()].band;
    return arguments.band;
  }
  __device__ __forceinline__ WarpRows rows_of(const Ring<c.work_stages>& at) const {
    const WorkItem& published = barriers.items[at.stage()];
    const int first = barriers.consumer_items[at.stage()][index].first + first_row;
    const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
    return {.b = published.b,
            .h = published.h,
            .first = first,
            .count = min((band_of(at).length_q << heads_log2) - first, 16),
            .sink = c.general ? published.sink : minus_infinity,
            .row_q = c.general ? published.row_q : 0,
            .heads_log2 = heads_log2,
            .split = c.decode ? published.more - 1 : 0};
  }
  __device__ __forceinline__ void release_item(Ring<c.work_stages>& at) {
    __syncwarp();  // all lanes have read the item
    release(&barriers.work_empty[at.stage()]);
    at.advance();
  }

  /// Advances to the next item in which this consumer sees a key, and finishes the items before it.
  __device__ __forceinline__ Work next_work() {
    while (true) {
      const Work found = current_work();
      if (!found.more || found.seen.count() > 0) return found;
      const int tiles = barriers.items[item.stage()].loaded.count();
      if (tiles > 0) {
        wait(&barriers.q_full[q.stage()], q.parity());
        release_queries();
        skip(tiles);
      }
      write_empty_rows<c>(arguments, rows_of(item));
      release_item(item);
    }
  }
  /// Whether the V tiles before the first one seen may be released after the first P is computed. At most
  /// `stages` V tiles may be released late; more would deadlock the other consumers.
  static __device__ __forceinline__ bool may_release_late(int tiles) { return tiles <= c.stages; }
  __device__ __forceinline__ void start_first_scores() {
    wait(&barriers.q_full[q.stage()], q.parity());
    const int tiles = tiles_before();
    may_release_late(tiles) ? skip_keys(tiles) : skip(tiles);
    start_scores_of_next_keys();
  }

  /// Called as soon as S of K tile n is complete: releases the K tile.
  __device__ __forceinline__ void take_scores(const Work& at, int n) {
    pin(s);
    if constexpr (c.blocks) {
      listed = barriers.listed[k.stage()];
      __syncwarp();  // all lanes have read it before the stage is released
    }
    release_keys();
    if (c.scarce_queries() && n == at.seen.first) release_queries();
  }
  /// Whether a call of a row with `drops` has dropout.
  __device__ __forceinline__ bool drops() const {
    return !c.may_drop() || arguments.mask.dropout.threshold != 0;
  }
  /// Draws which elements of P dropout keeps in K tile n.
  __device__ __forceinline__ void draw(int n) {
    if constexpr (c.drops) {
      if (!drops()) return;
      const WorkItem& published = barriers.items[item.stage()];
      const int row = barriers.consumer_items[item.stage()][index].first + first_row + lane_now() / 4;
      const int head = published.b * arguments.heads + published.h;
      draw_kept<c>(kept, arguments.mask.dropout, static_cast<std::uint32_t>(head), row, n * c.keys);
    }
  }
  /// Loads the padding of K tile n, if there is any beside the mask.
  __device__ __forceinline__ void load_padding(int n) {
    if constexpr (c.may_pad()) {
      const std::byte* row = barriers.padding[item.stage()];
      if (row == nullptr) return;
      const int length_k = band_of(item).length_k, first = n * c.keys + lane_now();
#pragma unroll
      for (int part = 0; part < c.keys / 32; ++part) {
        const int key = first + 32 * part;
        padding[part] = key < length_k ? row[key * arguments.padding.stride_k] : std::byte{0};
      }
    }
  }
  /// Hides the keys that it does not show.
  __device__ __forceinline__ void hide_padding() {
    if constexpr (c.may_pad()) {
      if (barriers.padding[item.stage()] == nullptr) return;
      static_assert(c.keys <= 128);
      std::uint32_t own = 0;  // the lane's columns, in the order of a row of S
      const int first = lane_now() % 4 * 2;
#pragma unroll
      for (int part = 0; part < c.keys / 32; ++part) {
        // From two bits of every eight to two bits of every two.
        std::uint32_t two = __ballot_sync(~0u, padding[part] != std::byte{0}) >> first & 0x03030303u;
        two = (two | two >> 6) & 0x000F000Fu;
        own |= ((two | two >> 12) & 0xFFu) << (8 * part);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) show<c, c.keys>(s, half, [=](int) { return own; });
    }
  }
  /// Applies the mask to S, once its tile has arrived.
  __device__ __forceinline__ void take_mask() {
    if constexpr (c.mask_tiles()) {
      if (c.blocks ? listed % 2 == 0 : arguments.mask.kind == MaskArguments::Kind::none) return;
      wait(&barriers.mask_full[index][mask.stage()], mask.parity());
      const std::uint32_t tile_smem = address(shared.mask(index, mask.stage()));
      if constexpr (c.blocks) {
        constexpr int row_bytes = mask_row_bytes(c, 0);
        hide_where_false<c>(s, tile_smem + first_row * row_bytes, 8 * row_bytes, lane_now());
      } else {
        if (!has_odd_mask<c>(arguments)) add_mask<T, c>(s, arguments.mask, tile_smem, first_row);
        if constexpr (c.combined()) {
          if (has_odd_mask<c>(arguments)) {
            const int first = barriers.consumer_items[item.stage()][index].first;
            add_odd_mask<T, c>(s, arguments, barriers.items[item.stage()], tile_smem, first,
                               first_row + lane_now() / 4);
          }
        }
      }
      __syncwarp();  // all lanes have read the mask's stage
      release(&barriers.mask_empty[index][mask.stage()]);
      mask.advance_by(has_odd_mask<c>(arguments) ? odd_tile_stages<c>(arguments.mask.bytes_log2)
                                                 : 1 << arguments.mask.bytes_log2);
    }
  }
  /// Applies the mask, softcap, ALiBi and the band to S of K tile n.
  __device__ __forceinline__ void finish_scores(const Work& at, int n) {
    if constexpr (c.masks_last()) return finish_general_scores(n);
    take_mask();
    hide_padding();
    if constexpr (c.blocks) n = listed / 2;
    const bool changes = c.general && arguments.general.changes_scores();
    // Registers are short in these kernels, so they read the item again.
    constexpr bool again = c.general || c.mask_tiles();
    const TileSpan whole = again ? barriers.consumer_items[item.stage()][index].whole : at.whole;
    const int first = again ? barriers.consumer_items[item.stage()][index].first : at.first;
    if (!changes && n >= whole.first && n < whole.last) return;
    const int lane = lane_now();
    const int row = first + first_row + lane / 4;
    const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
    const int key = n * c.keys + lane % 4 * 2;
    const BandOfKeys& band = band_of(item);
    if (changes) {
      const WorkItem& published = barriers.items[item.stage()];
      apply_score_rules<c>(s, arguments.general, published.h, published.slope,
                           row + band.length_k - band.length_q - key);
    }
    if (n >= whole.last) hide_after<c>(s, band, row, heads_log2, key);
    if (n < whole.first) hide_before<c>(s, band, row, heads_log2, key);
  }

  /// The same where a mask may come together with softcap and ALiBi, after which it is applied.
  __device__ __forceinline__ void finish_general_scores(int n) {
    if constexpr (c.blocks) n = listed / 2;
    const int lane = lane_now();
    const int key = n * c.keys + lane % 4 * 2;
    const WorkItem& published = barriers.items[item.stage()];
    const ConsumerItem& own = barriers.consumer_items[item.stage()][index];
    const BandOfKeys& band = published.band;
    const int row = own.first + first_row + lane / 4;
    if (arguments.general.changes_scores()) {
      apply_score_rules<c>(s, arguments.general, published.h, published.slope,
                           row + band.length_k - band.length_q - key);
    }
    take_mask();
    hide_padding();
    if (n >= own.whole.last) hide_after<c>(s, band, row, 0, key);
    if (n < own.whole.first) hide_before<c>(s, band, row, 0, key);
  }

  /// Zeroes rows of V past the entry's last key. Their P is 0, but the rows may hold anything, such as
  /// another entry's values, and 0 times infinity is NaN. Each consumer zeroes them for itself.
  __device__ __forceinline__ void clear_values_behind(int keys) {
    wait(&barriers.v_full[v.stage()], v.parity());
    std::byte* values_smem = shared.values(v.stage());
    constexpr int chunks = 8;  // of 16 bytes, a row of a panel
    const int from = max(keys, 0) * chunks;
#pragma unroll 1
    for (int panel = 0; panel < c.dim_v / 64; ++panel) {
      for (int n = from + static_cast<int>(threadIdx.x) % 128; n < c.keys * chunks; n += 128) {
        *reinterpret_cast<uint4*>(values_smem + panel * c.keys * 128 + n * 16) = uint4{};
      }
    }
    fence_async_proxy();
    if (index == 0) {
      sync_some<consumer_barrier(0), 128>();
    } else {
      sync_some<consumer_barrier(1), 128>();
    }
  }

  /// The same for V of K tile n, which is the next to be multiplied, if it has such rows.
  __device__ __forceinline__ void clear_values_behind_last_key(int n) {
    const int keys = band_of(item).length_k - n * c.keys;
    if (keys < c.keys) clear_values_behind(keys);
  }

  /// Whether K tile n holds at most 16 keys, often those past a class token: its softmax is cut to 16
  /// columns.
  __device__ __forceinline__ bool short_tile(const Work& at, int n) const {
    return c.trims && arguments.band.length_k - n * c.keys <= 16 && n >= at.whole.first;
  }

  /// Rounds P for the product with V. The row sums include P before dropout, which applies to the product
  /// only.
  __device__ __forceinline__ void round_p_for_product() {
    if constexpr (c.drops) {
      if (drops()) drop<c>(s, kept);
    }
    round_p<T, c>(p, s);
  }

  __device__ __forceinline__ void set_limits() {
    if constexpr (c.general) {
      const int heads_log2 = c.decode ? arguments.decode.heads_log2 : 0;
      const int first = barriers.consumer_items[item.stage()][index].first + first_row + lane_now() / 4;
      softmax.set_limits((band_of(item).length_q << heads_log2) - first);
    } else {
      softmax.set_limits();
    }
  }

  __device__ __forceinline__ void exponentiate_first_scores(const Work& at) {
    const int n = at.seen.last - 1;
    if (short_tile(at, n)) {
      const int lane = lane_now();
      hide_after<c, 16>(s, arguments.band, at.first + first_row + lane / 4, 0, n * c.keys + lane % 4 * 2);
      softmax.template start<16>(s);
      softmax.template exponentiate<16>(s);
      round_p<T, c, 16>(p, s);
    } else {
      finish_scores(at, n);
      softmax.start(s);
      softmax.exponentiate(s);
      round_p_for_product();
    }
    set_limits();
  }

  /// Computes P of the item's first K tile, whose S is complete.
  __device__ __forceinline__ void exponentiate_first(const Work& at) {
    take_scores(at, at.seen.last - 1);
    draw(c.blocks ? listed / 2 : at.seen.last - 1);
    load_padding(at.seen.last - 1);
    exponentiate_first_scores(at);
    if (may_release_late(tiles_before())) skip_values(tiles_before());
    if constexpr (c.general) {
      static_assert(c.consumers == 2);
      clear_values_behind_last_key(c.blocks ? listed / 2 : at.seen.last - 1);
    }
  }

  // Without an order, the products of several consumers run at once and end together. Then their softmaxes
  // coincide while the tensor cores are idle. So consumers start the products of a K tile one after another:
  // first the last consumer, which with causal and windows is the first to need a tile, then the one before
  // it, and so on. This applies to as many tiles of an item as every consumer has, the last ones of each, so
  // that no consumer waits for one that is done.
  __device__ __forceinline__ void wait_to_start() { sync_with_arrivals(consumer_barrier(index)); }
  __device__ __forceinline__ void let_next_start() {
    arrive_for_sync(consumer_barrier(index == 0 ? c.consumers - 1 : index - 1));
  }

  /// The loop over K tiles. It ends when the last P is computed; its product with V is still to be started.
  __device__ __forceinline__ void walk(const Work& at) {
    int ordered = 0;  // tiles below it are started one consumer after another
    if constexpr (c.ordered) ordered = at.seen.first + barriers.steps[item.stage()];
#pragma unroll 1
    for (int n = at.seen.last - 2; n >= at.seen.first; --n) {
      const bool in_order = c.ordered && n < ordered;
      if (c.ordered) {  // wait for data before holding up the other consumers
        wait_for_keys();
        wait_for_values();
      }
      if (in_order) wait_to_start();
      start_scores_of_next_keys<!c.ordered>();
      start_output_of_next_values<!c.ordered>(n < at.seen.last - 2);
      if (in_order) let_next_start();
      if constexpr (c.blocks) {
        draw(barriers.listed[k.stage()] / 2);
      } else {
        draw(n);
      }
      load_padding(n);
      wait_products<1>();  // S is complete
      take_scores(at, n);
      finish_scores(at, n);
      const bool raised = softmax.raise_maxima(s);
      softmax.exponentiate(s);
      pin(s);
      wait_products<0>();  // O is complete, and P may be overwritten
      pin(o);
      release_values();
      if (raised) softmax.rescale(o);
      round_p_for_product();
      if (raised) set_limits();
      if constexpr (c.general && c.blocks) clear_values_behind_last_key(listed / 2);  // it may be any tile
    }
  }

  /// Writes O and LSE of item `done`, whose products are complete.
  __device__ __forceinline__ void finish(Ring<c.work_stages>& done, int tiles_left) {
    pin(o);
    release_values();
    skip_values(tiles_left);
    const WarpRows rows = rows_of(done);
    if (c.decode && arguments.decode.splits > 1) {
      write_split<c>(arguments, rows, softmax, o);
      release_item(done);
      return;
    }
    float inverse[2];
    finish_sums<c>(arguments, rows, softmax, inverse);
    if constexpr (c.staged) {
      stage_output<T, c>(arguments, map_o, rows, inverse, o,
                         shared.queries(q_staged.stage()) + first_row * 128);
    } else if constexpr (c.paneled) {
      stage_output_by_panels<T, c>(arguments, map_o, rows, inverse, o, shared.output(index, first_row / 16));
    } else {
      write_output<T, c>(arguments, rows, inverse, o);
    }
    release_item(done);
  }

  /// Releases the Q stage of the item before, through which its O left.
  __device__ __forceinline__ void release_staged_queries() {
    if (threadIdx.x % 32 == 0) {
      wait_stores_read();
      arrive(&barriers.q_empty[q_staged.stage()]);
    }
  }

  /// All work items. Whatever this consumer sees, it waits for every stage of the CTA's tiles once and
  /// releases it once.
  ///
  /// The first S of an item is started before O of the item before is written, so that the tensor cores have
  /// work meanwhile. The V tiles held until then, the last one and those that only other consumers see, must
  /// be few: a consumer that waits for one of their stages holds K tiles that this one waits for.
  __device__ __forceinline__ void compute_all() {
    if (c.ordered && index == 0) let_next_start();  // the last consumer starts first
    Work at = next_work();
    if (!at.more) return;
    start_first_scores();
    wait_products<0>();
    bool o_leaves = false;  // through a Q stage, which is to be released
    while (true) {
      exponentiate_first(at);
      if (c.staged && o_leaves) release_staged_queries();
      walk(at);
      const bool add = at.seen.count() > 1;
      if (c.staged) {
        q_staged = q;
        q.advance();
      } else if (!c.scarce_queries()) {
        release_queries();
      }
      const int passed = tiles_after();
      Ring<c.work_stages> done = item;
      skip_keys(passed);
      item.advance();
      at = current_work();
      if (at.more && at.seen.count() > 0 && may_release_late(passed + tiles_before())) {
        start_output_of_next_values(add);
        start_first_scores();
        wait_products<1>();
        finish(done, passed);
        o_leaves = true;
        wait_products<0>();
      } else {
        start_output_of_next_values(add);
        wait_products<0>();
        finish(done, passed);
        if (c.staged) release_staged_queries();
        o_leaves = false;
        at = next_work();
        if (!at.more) {
          if (c.paneled && threadIdx.x % 32 == 0) wait_stores_read();  // before the CTA exits
          return;
        }
        start_first_scores();
        wait_products<0>();
      }
    }
  }
};

/// A barrier of the whole CTA for two branches of the kernel, which __syncthreads does not allow: each side
/// arrives at the other's barrier and waits at its own.
template <int threads>
__device__ __forceinline__ void meet_loaders() {
  arrive_some<loaders_may_start, threads>();
  sync_some<consumers_may_start, threads>();
}
template <int threads>
__device__ __forceinline__ void meet_consumers() {
  arrive_some<consumers_may_start, threads>();
  sync_some<loaders_may_start, threads>();
}

/// The warp's number. The shuffle tells the compiler that it is the same in all lanes.
__device__ __forceinline__ int this_warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

/// Attention on tensor cores by wgmma, for sm_90a alone. Warpgroup 0 of a CTA loads: warp 0 loads K, warp 1
/// Q, warp 2 V and the mask, and warp 3 is the tile scheduler. The other warpgroups are the consumers, which
/// compute. docs/wgmma.md draws who waits for whom.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), 1)
    forward_kernel(const __grid_constant__ MapsOf<Table> maps,
                   const __grid_constant__ ArgumentsOf<Table::rows[0].combined()> arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardConfig c = Table::rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const SharedMemory<c> shared{first_smem};
  Barriers<c>& barriers = shared.barriers();
  // ptxas places the else branch first, near the kernel's beginning, where instructions are fetched soonest.
  // The loaders are in it because they issue the CTA's first copies. They give up registers before the CTA's
  // barrier, so that no consumer waits for them.
  if (this_warp() >= 4) {
    if (this_warp() == 4 && elected()) prefetch_map(maps.k);
    if (this_warp() == 5 && elected()) prefetch_map(maps.q);
    barriers.init(this_warp());
    // Mbarriers and the first work item are ready. This is the last barrier of the whole CTA.
    meet_loaders<c.threads()>();
    take_registers<c.consumer_registers()>();
    const int warp = this_warp();
    Consumer<T, c> consumer(arguments, maps.o, shared, warp / 4 - 1, warp % 4);
    consumer.compute_all();
  } else {
    TileScheduler<c> scheduler{arguments, barriers};
    bool first_loaded = false;
    if (this_warp() == 0) first_loaded = load_first<c>(arguments, maps.q, maps.k, shared);
    if (this_warp() == 2 && elected()) prefetch_map(maps.v);
    barriers.init(this_warp());
    if (this_warp() == 3) scheduler.publish_first();
    keep_registers<c.producer_registers()>();
    meet_consumers<c.threads()>();  // as above
    const int warp = this_warp();
    if (warp == 0 && elected()) {
      if constexpr (c.blocks) {
        load_listed_keys<c>(arguments, maps.k, shared);
      } else {
        load_tiles<c, c.dim>(arguments.group, maps.k, shared, shared.keys(0), barriers.k_full,
                             barriers.k_empty, true, first_loaded, [](const WorkItem&, int) {});
      }
    }
    if (warp == 1 && elected()) load_queries<c>(arguments, maps.q, shared);
    const bool odd = has_odd_mask<c>(arguments);
    if constexpr (c.combined()) {
      if (warp == 2 && odd) load_values_and_odd_mask<c>(arguments, maps.v, shared);
    }
    if (warp == 2 && !odd && elected()) {
      const auto load_values = [&](const auto& ahead) {
        load_tiles<c, c.dim_v>(arguments.group, maps.v, shared, shared.values(0), barriers.v_full,
                               barriers.v_empty, false, false, ahead);
      };
      if constexpr (c.blocks) {
        load_listed_values<c>(arguments, maps.v, maps.mask, shared);
      } else if constexpr (c.masked) {
        MaskLoader<c> mask{arguments, maps.mask, shared};
        load_values([&](const WorkItem& item, int n) { mask.load(item, n); });
      } else {
        load_values([](const WorkItem&, int) {});
      }
    }
    if (warp == 3) scheduler.publish_all();
  }
#endif
}

}  // namespace tilewise::cuda::wgmma
