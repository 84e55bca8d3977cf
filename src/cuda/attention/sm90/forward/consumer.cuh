#pragma once

#include "cuda/attention/sm90/forward/dropout.cuh"
#include "cuda/attention/sm90/forward/loaders.cuh"
#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/attention/sm90/forward/output.cuh"
#include "cuda/ptx/barrier.cuh"

namespace tilewise::cuda::wgmma {

/// A warpgroup that computes. It has 64 queries of each of the block's tiles and keeps their scores, weights
/// and o in registers. Tensor cores make the scores of a tile of keys and add the values of the one before
/// while other consumers do softmax:
///
///   scores[n]   start ── wait ─ hide ─ raise ─ weigh ──────────────── round
///   output[n+1]      start ─────────────────────────────────── wait ─────── rescale
///
/// Tiles of keys come from the last to the first. Those of the block that none of its own queries sees it
/// lets go unread, so that it computes no tile that is hidden as a whole. From one tile of queries to the
/// next the same goes on: the first scores of the next are made while o of this one is written.
template <typename T, ForwardConfig c>
struct Consumer {
  const ForwardArguments& arguments;
  const CUtensorMap& map_o;
  const SharedMemory<c>& shared;
  Barriers<c>& barriers;
  const int index;                              ///< of the consumers
  const int first_row;                          ///< of the warp's, among the consumer's
  const TileDescriptor q_tile, k_tile, v_tile;  ///< the first place of each
  Ring<c.query_places, c.consumers> q, q_left;
  Ring<c.stages> k, v;
  Ring<c.turn_stages> turn;
  Ring<c.mask_places> mask;

  Scores<c> s;
  Weights<c> weights;
  Output<c> o;
  Softmax<c> softmax;
  KeptScores kept;  ///< by dropout

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  __device__ __forceinline__ Consumer(const ForwardArguments& arguments_, const CUtensorMap& map_o_,
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
  static __device__ __forceinline__ void let_go(Mbarrier* empty) {
    if (threadIdx.x % 32 == 0) arrive(empty);
  }
  __device__ __forceinline__ void let_go_of_queries() {
    let_go(&barriers.q_empty[q.stage()]);
    q.advance();
  }
  __device__ __forceinline__ void let_go_of_keys() {
    let_go(&barriers.k_empty[k.stage()]);
    k.advance();
  }
  __device__ __forceinline__ void let_go_of_values() {
    let_go(&barriers.v_empty[v.stage()]);
    v.advance();
  }
  // Lets tiles go unread. They are waited for: an arrival belongs to its phase.
  __device__ __forceinline__ void pass_by_keys(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers.k_full[k.stage()], k.parity());
      let_go_of_keys();
    }
  }
  __device__ __forceinline__ void pass_by_values(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers.v_full[v.stage()], v.parity());
      let_go_of_values();
    }
  }
  /// Both in turn, as the others take them.
  __device__ __forceinline__ void pass_by(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      pass_by_keys(1);
      pass_by_values(1);
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
  /// To o so far, or to none.
  template <bool waits = true>
  __device__ __forceinline__ void start_output_of_next_values(bool add) {
    if (waits) wait_for_values();
    start_output<T, c>(o, weights, v_tile + v.stage() * (c.value_bytes() / 16), add);
  }

  /// A tile of queries as it concerns this consumer.
  struct Part {
    bool more;       ///< false: there was no further tile
    int first;       ///< its own first query
    TileSpan seen;   ///< tiles of keys that its own queries see something of
    TileSpan whole;  ///< those that all of them see all of
  };
  /// The part of the turn at hand, once that is known.
  __device__ __forceinline__ Part part() {
    wait(&barriers.turn_full[turn.stage()], turn.parity());
    const HandedTurn& handed = barriers.turns[turn.stage()];
    const HandedPart own = barriers.parts[turn.stage()][index];
    return {handed.more != 0, own.first, own.seen, own.whole};
  }
  /// Tiles that are loaded before the first it sees, and after the last, for other consumers.
  __device__ __forceinline__ int ahead() const {
    return barriers.turns[turn.stage()].loaded.last - barriers.parts[turn.stage()][index].seen.last;
  }
  __device__ __forceinline__ int left() const {
    return barriers.parts[turn.stage()][index].seen.first - barriers.turns[turn.stage()].loaded.first;
  }
  __device__ __forceinline__ const BandOfKeys& band_of(const Ring<c.turn_stages>& at) const {
    if constexpr (c.general) return barriers.turns[at.stage()].band;
    return arguments.band;
  }
  __device__ __forceinline__ WarpRows rows_of(const Ring<c.turn_stages>& at) const {
    const HandedTurn& handed = barriers.turns[at.stage()];
    const int first = barriers.parts[at.stage()][index].first + first_row;
    const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
    return {.b = handed.b,
            .h = handed.h,
            .first = first,
            .count = min((band_of(at).length_q << heads_log2) - first, 16),
            .sink = c.general ? handed.sink : minus_infinity,
            .row_q = c.general ? handed.row_q : 0,
            .heads_log2 = heads_log2,
            .share = c.few ? handed.more - 1 : 0};
  }
  __device__ __forceinline__ void let_go_of_turn(Ring<c.turn_stages>& at) {
    __syncwarp();  // all lanes have read it
    let_go(&barriers.turn_empty[at.stage()]);
    at.advance();
  }

  /// Goes on to the next part with something to see, and is done with those before it.
  __device__ __forceinline__ Part find_part() {
    while (true) {
      const Part found = part();
      if (!found.more || found.seen.count() > 0) return found;
      const int tiles = barriers.turns[turn.stage()].loaded.count();
      if (tiles > 0) {
        wait(&barriers.q_full[q.stage()], q.parity());
        let_go_of_queries();
        pass_by(tiles);
      }
      write_nothing<c>(arguments, rows_of(turn));
      let_go_of_turn(turn);
    }
  }
  /// Whether the values that are ahead may be let go when the first weights are there. No longer than so many
  /// places are the others able to go on without.
  static __device__ __forceinline__ bool few(int tiles) { return tiles <= c.stages; }
  __device__ __forceinline__ void start_first_scores() {
    wait(&barriers.q_full[q.stage()], q.parity());
    const int tiles = ahead();
    few(tiles) ? pass_by_keys(tiles) : pass_by(tiles);
    start_scores_of_next_keys();
  }

  /// What is due as soon as the scores of tile n of keys are there.
  __device__ __forceinline__ void take_scores(const Part& at, int n) {
    pin(s);
    let_go_of_keys();
    if (c.scarce_queries() && n == at.seen.first) let_go_of_queries();
  }
  /// Draws what dropout keeps of tile n of keys.
  __device__ __forceinline__ void draw(int n) {
    if constexpr (c.drops) {
      const HandedTurn& handed = barriers.turns[turn.stage()];
      const int row = barriers.parts[turn.stage()][index].first + first_row + lane_now() / 4;
      const int head = handed.b * arguments.heads + handed.h;
      draw_kept<c>(kept, arguments.mask.dropout, static_cast<std::uint32_t>(head), row, n * c.keys);
    }
  }
  /// What the mask makes of scores, once its tile is there.
  __device__ __forceinline__ void take_mask() {
    if constexpr (c.masked) {
      if (arguments.mask.kind == MaskArguments::Kind::none) return;
      wait(&barriers.mask_full[index][mask.stage()], mask.parity());
      add_mask<T, c>(s, arguments.mask, address(shared.mask(index, mask.stage())), first_row);
      __syncwarp();  // all lanes have read it
      let_go(&barriers.mask_empty[index][mask.stage()]);
      mask.advance_by(1 << arguments.mask.bytes_log2);
    }
  }
  /// What softcap, ALiBi, the mask and the band make of them.
  __device__ __forceinline__ void finish_scores(const Part& at, int n) {
    take_mask();
    const bool changes = c.general && (arguments.general.softcap || arguments.general.alibi);
    // Registers are short in these kernels: they read this again.
    constexpr bool again = c.general || c.masked;
    const TileSpan whole = again ? barriers.parts[turn.stage()][index].whole : at.whole;
    const int first = again ? barriers.parts[turn.stage()][index].first : at.first;
    if (!changes && n >= whole.first && n < whole.last) return;
    const int lane = lane_now();
    const int row = first + first_row + lane / 4;
    const int heads_log2 = c.few ? arguments.few.heads_log2 : 0;
    const int key = n * c.keys + lane % 4 * 2;
    const BandOfKeys& band = band_of(turn);
    if (changes) {
      change<c>(s, arguments.general, barriers.turns[turn.stage()].slope,
                row + band.length_k - band.length_q - key);
    }
    if (n >= whole.last) hide_after<c>(s, band, row, heads_log2, key);
    if (n < whole.first) hide_before<c>(s, band, row, heads_log2, key);
  }

  /// Clears values past the entry's last key. Their weights are 0, but they may be anything, another entry's
  /// or nobody's, and 0 times infinity is none. Each consumer clears the rows for itself.
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
      sync_some<1, 128>();
    } else {
      sync_some<2, 128>();
    }
  }

  /// Of tile n of keys all but 16 are past the last key: a class token's, often.
  __device__ __forceinline__ bool short_tile(const Part& at, int n) const {
    return c.trims && arguments.band.length_k - n * c.keys <= 16 && n >= at.whole.first;
  }

  /// Weights that are in the sums go on to the product with values, if dropout lets them.
  __device__ __forceinline__ void round_scores() {
    if constexpr (c.drops) drop<c>(s, kept);
    round_weights<T, c>(weights, s);
  }

  __device__ __forceinline__ void weigh_first_scores(const Part& at) {
    const int n = at.seen.last - 1;
    if (short_tile(at, n)) {
      const int lane = lane_now();
      hide_after<c, 16>(s, arguments.band, at.first + first_row + lane / 4, 0, n * c.keys + lane % 4 * 2);
      softmax.template start<16>(s);
      softmax.template weigh<16>(s);
      round_weights<T, c, 16>(weights, s);
    } else {
      finish_scores(at, n);
      softmax.start(s);
      softmax.weigh(s);
      round_scores();
    }
    softmax.set_limits();
  }

  /// The first weights of a part, from scores that are there.
  __device__ __forceinline__ void weigh_first(const Part& at) {
    take_scores(at, at.seen.last - 1);
    draw(at.seen.last - 1);
    weigh_first_scores(at);
    if (few(ahead())) pass_by_values(ahead());
    if constexpr (c.general) {
      static_assert(c.consumers == 2);
      const int keys = band_of(turn).length_k - (at.seen.last - 1) * c.keys;
      if (keys < c.keys) clear_values_behind(keys);
    }
  }

  // Where consumers start products as they please, those of several run at once and end together, and so
  // their softmaxes come together, beside idle tensor cores. So they take turns at starting: the last
  // consumer, which with causal and windows is the first to need a tile, then the one before it and so on,
  // each a tile of keys. Of a turn's tiles as many are started that way as each consumer has, the last ones
  // of each, so that nobody waits for one that is done.
  __device__ __forceinline__ void wait_turn() { sync_with_arrivals(1 + index); }
  __device__ __forceinline__ void pass_turn() { arrive_for_sync(index == 0 ? c.consumers : index); }

  /// Goes on until the last weights are there, whose values are still to be added.
  __device__ __forceinline__ void walk(const Part& at) {
    int ordered = 0;  // tiles before it are started in turn
    if constexpr (c.ordered) ordered = at.seen.first + barriers.steps[turn.stage()];
#pragma unroll 1
    for (int n = at.seen.last - 2; n >= at.seen.first; --n) {
      const bool in_turn = c.ordered && n < ordered;
      if (c.ordered) {  // not while others wait
        wait_for_keys();
        wait_for_values();
      }
      if (in_turn) wait_turn();
      start_scores_of_next_keys<!c.ordered>();
      start_output_of_next_values<!c.ordered>(n < at.seen.last - 2);
      if (in_turn) pass_turn();
      draw(n);
      wait_products<1>();  // for the scores
      take_scores(at, n);
      finish_scores(at, n);
      const bool raised = softmax.raise(s);
      softmax.weigh(s);
      pin(s);
      wait_products<0>();  // o is here, and weights are free
      pin(o);
      let_go_of_values();
      if (raised) softmax.rescale(o);
      round_scores();
      if (raised) softmax.set_limits();
    }
  }

  /// When o of a part is complete.
  __device__ __forceinline__ void finish(Ring<c.turn_stages>& done, int left) {
    pin(o);
    let_go_of_values();
    pass_by_values(left);
    const WarpRows rows = rows_of(done);
    if (c.few && arguments.few.shares > 1) {
      write_share<c>(arguments, rows, softmax, o);
      let_go_of_turn(done);
      return;
    }
    float inverse[2];
    finish_sums<c>(arguments, rows, softmax, inverse);
    if constexpr (c.staged) {
      stage_output<T, c>(arguments, map_o, rows, inverse, o,
                         shared.queries(q_left.stage()) + first_row * 128);
    } else if constexpr (c.paneled) {
      stage_output_by_panels<T, c>(arguments, map_o, rows, inverse, o, shared.output(index, first_row / 16));
    } else {
      write_output<T, c>(arguments, rows, inverse, o);
    }
    let_go_of_turn(done);
  }

  /// The queries of the part before, in whose place its o was.
  __device__ __forceinline__ void let_go_of_queries_left() {
    if (threadIdx.x % 32 == 0) {
      wait_stores_read();
      arrive(&barriers.q_empty[q_left.stage()]);
    }
  }

  /// All parts. Whatever it sees, each place of the block's tiles is waited for and let go once.
  ///
  /// The first scores of a part are started before o of the one before is written, so that tensor cores have
  /// work meanwhile. Values that it holds until then, its last and those of tiles that only other consumers
  /// see, must be few: a consumer that waits for one of their places holds keys that this one waits for.
  __device__ __forceinline__ void compute_all() {
    if (c.ordered && index == 0) pass_turn();  // the last one's is the first
    Part at = find_part();
    if (!at.more) return;
    start_first_scores();
    wait_products<0>();
    bool o_leaves = false;  // and the queries in whose place it was are to be let go
    while (true) {
      weigh_first(at);
      if (c.staged && o_leaves) let_go_of_queries_left();
      walk(at);
      const bool add = at.seen.count() > 1;
      if (c.staged) {
        q_left = q;
        q.advance();
      } else if (!c.scarce_queries()) {
        let_go_of_queries();
      }
      const int passed = left();
      Ring<c.turn_stages> done = turn;
      pass_by_keys(passed);
      turn.advance();
      at = part();
      if (at.more && at.seen.count() > 0 && few(passed + ahead())) {
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
        if (c.staged) let_go_of_queries_left();
        o_leaves = false;
        at = find_part();
        if (!at.more) {
          if (c.paneled && threadIdx.x % 32 == 0) wait_stores_read();  // before the block is gone
          return;
        }
        start_first_scores();
        wait_products<0>();
      }
    }
  }
};

}  // namespace tilewise::cuda::wgmma
