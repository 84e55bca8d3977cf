#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/sm90/backward/features.cuh"
#include "cuda/attention/sm90/backward/rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::wgmma_backward {

// The pair kernels, for the gradient of a mask whose elements entries, heads, queries or keys share. It takes
// two more passes over the pairs, each of which computes S and dP again, with the same instructions as the
// tile kernel:
//
//   delta  delta = rowsum(P ∘ dP) / rowsum(P), in place of rowsum(dO ∘ O). A CTA has a tile of queries and
//          walks over their keys. O is rounded, and in a row with one high weight dS is mostly that rounding
//          error, which a sum of many such dS shows.
//   dmask  A CTA has a tile of dmask in registers and walks over all pairs that share it. So each element
//          has one writer, and its sum has one order. Where there are few tiles, several CTAs share one, and
//          another kernel adds their sums in order.
//
// One thread publishes each tile through shared memory and loads the operands that are not there yet:
// consecutive tiles with the same queries share Q and dO, and those with the same keys share K and V.

enum class PairSum { delta, dmask };

/// The tile kernel's Config, with half of its producer warps: nothing of dQ has to be added.
constexpr Config pair_config(Config c) {
  c.producer_warps = 4;
  return c;
}

/// Numbers of stages.
struct PairStages {
  static constexpr int k = 2;      ///< stages of K and V
  static constexpr int steps = 2;  ///< steps that are published ahead
  /// Stages of Q and dO.
  static constexpr int q(const Config& c) { return c.wide() || (c.listed && c.dim > 64) ? 1 : 2; }
};

/// A tile of pairs.
struct PairStep {
  int b, head_q, tile, first_key;
  int length_k;  ///< keys of the entry
  int block;     ///< the tile of the block mask, or block_full
  bool loads_q, loads_k;
  static constexpr int end = -1;  ///< in place of `tile`: there are no more tiles
};

/// The tiles of a CTA: ranges of entries, heads, query tiles and key tiles. Key tiles are the innermost loop.
struct PairJob {
  int b, head_q, tile, key_tile;  ///< the first of each range
  int heads, tiles, key_tiles;    ///< lengths of the ranges
  std::int64_t begin, end;        ///< the CTA's part of the tiles, which are numbered over all ranges

  template <Config c>
  __device__ static PairJob of_delta(const Sizes& sizes, int tiles, unsigned index) {
    PairJob job{.heads = 1, .tiles = 1};
    job.tile = tiles - 1 - static_cast<int>(index % tiles);  // with a band, the last tiles have the most keys
    job.head_q = static_cast<int>(index / tiles % sizes.heads_q);
    job.b = static_cast<int>(index / tiles / sizes.heads_q);
    const Entry entry = Entry::of(sizes, job.b);
    const std::int64_t first = std::int64_t{job.tile} * c.queries + entry.offset;
    const std::int64_t low = max(std::int64_t{0}, first - sizes.left);
    const std::int64_t high = min(static_cast<std::int64_t>(entry.length_k), first + c.queries + sizes.right);
    job.key_tile = static_cast<int>(low / c.keys);
    job.key_tiles = max(0, static_cast<int>((high + c.keys - 1) / c.keys) - job.key_tile);
    job.end = job.key_tiles;
    return job;
  }

  template <Config c>
  __device__ static PairJob of_dmask(const Sizes& sizes, const DmaskJobs& jobs, int tiles, unsigned index) {
    const auto next = [&](int count) {
      const auto at = static_cast<int>(index % count);
      index /= count;
      return at;
    };
    PairJob job{};
    job.key_tile = next(jobs.key_tiles);
    job.tile = next(jobs.tiles);
    job.head_q = next(jobs.heads);
    job.b = next(jobs.batch);
    job.heads = sizes.heads_q / jobs.heads;
    job.tiles = tiles / jobs.tiles;
    job.key_tiles = (sizes.length_k + c.keys - 1) / c.keys / jobs.key_tiles;
    const std::int64_t count = std::int64_t{sizes.batch / jobs.batch} * job.heads * job.tiles * job.key_tiles;
    job.begin = count * index / jobs.splits;
    job.end = count * (index + 1) / jobs.splits;
    return job;
  }

  __device__ PairStep step(std::int64_t number, int keys) const {
    PairStep step{};
    step.first_key = (key_tile + static_cast<int>(number % key_tiles)) * keys;
    number /= key_tiles;
    step.tile = tile + static_cast<int>(number % tiles);
    number /= tiles;
    step.head_q = head_q + static_cast<int>(number % heads);
    step.b = b + static_cast<int>(number / heads);
    return step;
  }
};

/// A CTA's shared memory.
template <Config c>
struct PairShared {
  using KeyPanels = typename Shared<c>::KeyPanels;
  using QueryPanels = typename Shared<c>::QueryPanels;
  static constexpr int q_stages = PairStages::q(c);

  std::byte* k;         ///< PairStages::k x [keys, dim]; finally the warps' sums
  std::byte* v;         ///< PairStages::k x [keys, dim]
  std::byte* q;         ///< q_stages x [queries, dim]
  std::byte* d_o;       ///< q_stages x [queries, dim]
  std::byte* mask;      ///< boxes of [queries, 128 bytes of keys]
  std::uint32_t* seen;  ///< listed: [kept_words, queries], or four words
  std::uint32_t* kept;  ///< [kept_words, queries]
  float* lse;           ///< q_stages x [queries]
  float* offset;        ///< q_stages x [queries]
  float* delta;         ///< q_stages x [queries]
  Mbarrier* q_full;     ///< [q_stages]: Q, dO and the values of their rows have arrived
  Mbarrier* q_empty;
  Mbarrier* k_full;  ///< [PairStages::k]: K and V have arrived
  Mbarrier* k_empty;
  Mbarrier* step_full;
  Mbarrier* step_empty;
  Mbarrier* mask_full;
  Mbarrier* mask_empty;
  Mbarrier* seen_full;
  Mbarrier* seen_empty;
  Mbarrier* kept_full;
  Mbarrier* kept_empty;
  Words* words;
  PairStep* steps;

  static constexpr int seen_bytes = c.listed ? c.kept_bytes() : 0;
  static constexpr int barriers = 2 * (q_stages + PairStages::k + PairStages::steps) + 6;
  static constexpr int value_bytes = 3 * q_stages * c.queries * 4 + barriers * 8 +
                                     static_cast<int>(sizeof(Words)) +
                                     PairStages::steps * static_cast<int>(sizeof(PairStep));
  static constexpr std::size_t bytes(int mask_bytes, bool dropout) {
    return 2 * PairStages::k * c.k_bytes() + 2 * q_stages * c.q_bytes() + mask_bytes + seen_bytes +
           (dropout ? c.kept_bytes() : 0) + value_bytes;
  }

  __device__ PairShared(std::byte* first, int mask_bytes, bool dropout)
      : k(first),
        v(k + PairStages::k * c.k_bytes()),
        q(v + PairStages::k * c.k_bytes()),
        d_o(q + q_stages * c.q_bytes()),
        mask(d_o + q_stages * c.q_bytes()),
        seen(reinterpret_cast<std::uint32_t*>(mask + mask_bytes)),
        kept(seen + seen_bytes / 4),
        lse(reinterpret_cast<float*>(kept + (dropout ? c.kept_bytes() / 4 : 0))),
        offset(lse + q_stages * c.queries),
        delta(offset + q_stages * c.queries),
        q_full(reinterpret_cast<Mbarrier*>(delta + q_stages * c.queries)),
        q_empty(q_full + q_stages),
        k_full(q_empty + q_stages),
        k_empty(k_full + PairStages::k),
        step_full(k_empty + PairStages::k),
        step_empty(step_full + PairStages::steps),
        mask_full(step_empty + PairStages::steps),
        mask_empty(mask_full + 1),
        seen_full(mask_empty + 1),
        seen_empty(seen_full + 1),
        kept_full(seen_empty + 1),
        kept_empty(kept_full + 1),
        words(reinterpret_cast<Words*>(kept_empty + 1)),
        steps(reinterpret_cast<PairStep*>(words + 1)) {}

  __device__ void init_barriers(int dropout_warps) const {
    const auto init = [](Mbarrier* full, Mbarrier* empty, int stages, int arrivals) {
      for (int n = 0; n < stages; ++n) {
        init_barrier(full + n, arrivals);
        init_barrier(empty + n, c.consumer_warps);
      }
    };
    init(q_full, q_empty, q_stages, 1);
    init(k_full, k_empty, PairStages::k, 1);
    init(step_full, step_empty, PairStages::steps, 1);
    init(mask_full, mask_empty, 1, 1);
    init(seen_full, seen_empty, 1, 1);
    init(kept_full, kept_empty, 1, dropout_warps);
    fence_barrier_inits();
  }
};

/// The keys of a tile that the entry has, and those that its queries see.
template <Config c>
struct PairBand {
  int key_count;
  Visible visible;

  __device__ PairBand(const Sizes& sizes, const PairStep& step) {
    Walk walk{};
    walk.first_key = step.first_key;
    const int behind = step.length_k - step.first_key;  // keys from the tile's first on
    walk.key_count = max(0, min(c.keys, behind));
    walk.position = std::int64_t{step.first_key} - (sizes.bottom_right ? step.length_k - sizes.length_q : 0);
    key_count = walk.key_count;
    // This does not compare key_count with c.keys: ptxas 13.0 would merge that and the bounds above into one
    // VIMNMX.RELU, whose predicate is also true for fewer keys.
    visible = Visible::of<c>(sizes, walk, step.tile, behind >= c.keys);
  }
  /// Whether any query of the tile sees any key of it. Neighbouring queries see overlapping or adjacent
  /// ranges of keys, so the keys that the tile sees are one range.
  __device__ bool any(const Sizes& sizes, const PairStep& step) const {
    const int queries = min(c.queries, sizes.length_q - step.tile * c.queries);
    return visible.high > visible.low && visible.low < key_count && queries - 1 + visible.high > 0;
  }
};

/// Publishes the tiles and loads their operands. Called by one thread.
template <Config c, PairSum sum>
__device__ void load_pairs(const PairParams& params, const PairShared<c>& shared, const PairJob& job) {
  const TileParams& of = params.tile;
  const Sizes& sizes = of.sizes;
  const Workspace& workspace = of.workspace;
  Ring<PairShared<c>::q_stages> q_at;
  Ring<PairStages::k> k_at;
  Ring<PairStages::steps> step_at;
  Ring<1> mask_at, seen_at;
  PairStep last{.b = -1};
  const auto publish = [&](const PairStep& step) {
    const int at = step_at.stage();
    wait(shared.step_empty + at, step_at.parity() ^ 1);
    shared.steps[at] = step;
    arrive(shared.step_full + at);
    step_at.advance();
  };
#pragma unroll 1
  for (std::int64_t number = job.begin; number < job.end; ++number) {
    PairStep step = job.step(number, c.keys);
    step.length_k = Entry::of(sizes, step.b).length_k;
    if (!PairBand<c>(sizes, step).any(sizes, step)) continue;
    if constexpr (c.listed) {
      const BlockLists& blocks = of.score.blocks;
      step.block =
          blocks.states[blocks.row(step.b, step.head_q, step.first_key / blocks.keys) * blocks.query_blocks +
                        step.tile / blocks.query_tiles];
      if (step.block < block_full) continue;
    }
    const int head_kv = step.head_q / sizes.group;
    const bool first = last.b < 0;
    const bool same_entry = step.b == last.b;
    step.loads_q = !same_entry || step.head_q != last.head_q || step.tile != last.tile;
    step.loads_k = !same_entry || head_kv != last.head_q / sizes.group || step.first_key != last.first_key;
    last = step;
    publish(step);
    if (step.loads_q) {
      const int at = q_at.stage();
      wait(shared.q_empty + at, q_at.parity() ^ 1);
      constexpr int values = sum == PairSum::dmask ? 3 : 2;
      arrive_expecting(shared.q_full + at, 2 * c.q_bytes() + values * c.queries * 4);
      for (int panel = 0; panel < c.panels(); ++panel) {
        const int offset = at * c.q_bytes() + panel * PairShared<c>::QueryPanels::panel_bytes;
        copy_box(shared.q + offset, of.q, shared.q_full + at, 64 * panel, step.tile * c.queries, step.head_q,
                 step.b);
        copy_box(shared.d_o + offset, of.d_o, shared.q_full + at, 64 * panel, step.tile * c.queries,
                 step.head_q, step.b);
      }
      const std::int64_t row =
          ((std::int64_t{step.b} * sizes.heads_q + step.head_q) * workspace.tiles + step.tile) * c.queries;
      const auto copy = [&](float* to, const float* from) {
        copy_bytes(to + at * c.queries, from + row, c.queries * 4, shared.q_full + at);
      };
      copy(shared.lse, workspace.lse);
      copy(shared.offset, workspace.offset);
      if constexpr (sum == PairSum::dmask) copy(shared.delta, workspace.delta);
      q_at.advance();
    }
    if (step.loads_k) {
      const int at = k_at.stage();
      wait(shared.k_empty + at, k_at.parity() ^ 1);
      arrive_expecting(shared.k_full + at, 2 * c.k_bytes());
      for (int panel = 0; panel < c.panels(); ++panel) {
        const int offset = at * c.k_bytes() + panel * PairShared<c>::KeyPanels::panel_bytes;
        copy_box(shared.k + offset, of.k, shared.k_full + at, 64 * panel, step.first_key, head_kv, step.b);
        copy_box(shared.v + offset, of.v, shared.k_full + at, 64 * panel, step.first_key, head_kv, step.b);
      }
      k_at.advance();
    }
    if (first || params.reloads_mask) {
      wait(shared.mask_empty, mask_at.parity() ^ 1);
      arrive_expecting(shared.mask_full, mask_box_bytes<c>(of.score));
      copy_mask<c>(of, shared.mask, shared.mask_full, step.first_key, step.tile * c.queries, step.head_q,
                   step.b);
      mask_at.advance();
    }
    if (c.listed && step.block >= 0) {
      const BlockLists& blocks = of.score.blocks;
      wait(shared.seen_empty, seen_at.parity() ^ 1);
      arrive_expecting(shared.seen_full, blocks.bit_words(c) * 4);
      copy_bytes(shared.seen, blocks.bits_of(c, step.block, step.tile, step.first_key / c.keys),
                 blocks.bit_words(c) * 4, shared.seen_full);
      seen_at.advance();
    }
  }
  publish({.tile = PairStep::end});
}

/// Draws dropout's bits of all tiles, with `warps` warps.
template <Config c>
__device__ void draw_pairs(const PairParams& params, const PairShared<c>& shared, int warp, int warps) {
  Ring<PairStages::steps> step_at;
  Ring<1> kept_at;
#pragma unroll 1
  while (true) {
    wait(shared.step_full + step_at.stage(), step_at.parity());
    const PairStep step = shared.steps[step_at.stage()];
    if (step.tile == PairStep::end) return;
    step_at.advance();
    wait(shared.kept_empty, kept_at.parity() ^ 1);
    kept_at.advance();
    const auto which = [&]() -> DropoutTile {
      return {step.first_key, step.tile * c.queries, step.b * params.tile.sizes.heads_q + step.head_q};
    };
    draw_bits<c>(params.tile.score, *shared.words, shared.kept, which, warp, warps);
    if (lane_now() == 0) arrive(shared.kept_full);
  }
}

/// Computes P and dP of the tiles, in the accumulator layout of the tile kernel, and their sums.
template <typename T, Config c, PairSum sum>
struct PairConsumer {
  static constexpr int size = c.own_queries() / 2;  ///< pairs of a lane
  /// Queries of a lane: number 2j + e is query 8j + e.
  static constexpr int query_count = c.own_queries() / 4;

  const PairParams& params;
  const PairShared<c>& shared;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const LanePlace<c> place{warp, lane};

  __device__ void arrive_once(Mbarrier* barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  /// Walks over all tiles and calls take(j, p, dp, delta) for the lane's four pairs among queries [8j, 8j +
  /// 8) of each. Dropout is applied to dP. dP is 0 where P is 0: V past a key length may hold anything.
  template <typename Take>
  __device__ __forceinline__ void for_each_four(const Take& take) const {
    const TileParams& of = params.tile;
    const ScoreParams& score = of.score;
    Ring<PairShared<c>::q_stages> q_next;
    Ring<PairStages::k> k_next;
    Ring<PairStages::steps> step_at;
    Ring<1> mask_at, seen_at, kept_at;
    int q = 0, k = 0;
    bool first = true;
#pragma unroll 1
    while (true) {
      wait(shared.step_full + step_at.stage(), step_at.parity());
      const PairStep step = shared.steps[step_at.stage()];
      if (step.tile == PairStep::end) return;
      // Operands of the previous tile that this one does not share are released.
      if (step.loads_q) {
        if (!first) arrive_once(shared.q_empty + q);
        q = q_next.stage();
        wait(shared.q_full + q, q_next.parity());
        q_next.advance();
      }
      if (step.loads_k) {
        if (!first) arrive_once(shared.k_empty + k);
        k = k_next.stage();
        wait(shared.k_full + k, k_next.parity());
        k_next.advance();
      }
      float s[size], dp[size];
      start_scores<T, c, c.dim>(s, shared.k + k * c.k_bytes(), shared.q + q * c.q_bytes(), warp / 4);
      start_scores<T, c, c.dim_v>(dp, shared.v + k * c.k_bytes(), shared.d_o + q * c.q_bytes(), warp / 4);
      std::uint32_t kept = ~0u;
      if (score.dropout) {
        wait(shared.kept_full, kept_at.parity());
        kept_at.advance();
        kept = kept_pairs<c>(shared.kept, place);
        arrive_once(shared.kept_empty);
      }
      if (first || params.reloads_mask) {
        wait(shared.mask_full, mask_at.parity());
        mask_at.advance();
      }
      std::uint32_t seen = ~0u;
      if (c.listed && step.block >= 0) {
        wait(shared.seen_full, seen_at.parity());
        seen_at.advance();
        seen = seen_pairs<c>(score.blocks, shared.seen, place);
        arrive_once(shared.seen_empty);
      }
      first = false;
      const PairBand<c> band(of.sizes, step);
      const TileInputs<c> inputs{
          .score = score,
          .mask_smem = shared.mask,
          .lse_smem = shared.lse + q * c.queries + place.first_query(),
          .offset_smem = shared.offset + q * c.queries + place.first_query(),
          .place = place,
          .slope = score.alibi ? static_cast<float>(score.alibi_slopes.at(step.b, step.head_q)) : 0.0f,
          .distance = step.tile * c.queries + place.first_query() + step.length_k - of.sizes.length_q -
                      (step.first_key + place.first_key()),
          .visible = band.visible,
          .key_count = band.key_count,
          .seen = seen};
      wait_products<1>();  // S
      pin(s);
      compute_p_general<T, true, c>(score.mask, s, inputs, [&](int j, const float(&p)[4], const float(&)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * j + e] = p[e];
      });
      if (params.reloads_mask) arrive_once(shared.mask_empty);
      wait_products<0>();  // dP
      pin(dp);
      const float* delta_smem = shared.delta + q * c.queries + place.first_query();
#pragma unroll
      for (int j = 0; j < size / 4; ++j) {
        float p[4], own[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[e] = s[4 * j + e];
          own[e] = p[e] != 0 && (kept >> (4 * j + e) & 1) != 0 ? dp[4 * j + e] * of.dv_scale : 0.0f;
        }
        take(j, p, own, delta_smem + 8 * j);
      }
      arrive_once(shared.step_empty + step_at.stage());
      step_at.advance();
    }
  }

  /// Adds the sums of the lanes that have the same queries, and stores the warp's sums in shared memory.
  __device__ __forceinline__ void add_keys(float* to_smem, float (&x)[query_count]) const {
#pragma unroll
    for (int n = 0; n < query_count; ++n) {
#pragma unroll
      for (int other = 4; other < 32; other *= 2) x[n] += __shfl_xor_sync(~0u, x[n], other);
      if (lane < 4) to_smem[warp * c.own_queries() + n / 2 * 8 + lane * 2 + n % 2] = x[n];
    }
  }
  /// The sum of a query of the tile over all warps that have it.
  static __device__ float query_sum(const float* smem, int query) {
    constexpr int warps = c.wide() ? 4 : c.consumer_warps;  // warps per query
    const float* first = smem + query / c.own_queries() * warps * c.own_queries() + query % c.own_queries();
    float sum_of_warps = 0;
    for (int n = 0; n < warps; ++n) sum_of_warps += first[n * c.own_queries()];
    return sum_of_warps;
  }
  static constexpr int sum_floats = c.consumer_warps * c.own_queries();

  __device__ void compute_delta(const PairJob& job) const {
    float sum_p[query_count] = {}, sum_p_dp[query_count] = {};
    for_each_four([&](int j, const float(&p)[4], const float(&dp)[4], const float*) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum_p[2 * j + e % 2] += p[e];
        sum_p_dp[2 * j + e % 2] = fmaf(p[e], dp[e], sum_p_dp[2 * j + e % 2]);
      }
    });
    auto* smem = reinterpret_cast<float*>(shared.k);
    sync_some<both_consumers, c.consumer_threads>();  // no product of either consumer reads K any more
    add_keys(smem, sum_p);
    add_keys(smem + sum_floats, sum_p_dp);
    sync_some<both_consumers, c.consumer_threads>();  // all warps have stored their sums
    const auto r = static_cast<int>(threadIdx.x);
    const Sizes& sizes = params.tile.sizes;
    const int query = job.tile * c.queries + r;
    if (r >= c.queries || query >= sizes.length_q) return;
    const Workspace& workspace = params.tile.workspace;
    const std::int64_t row =
        ((std::int64_t{job.b} * sizes.heads_q + job.head_q) * workspace.tiles + job.tile) * c.queries + r;
    const float lse = workspace.lse[row];
    if (isinf(lse)) return;  // an empty row
    float total = query_sum(smem, r);
    if (params.sinks.data != nullptr) {
      const auto sink = static_cast<float>(params.sinks.at(job.b, job.head_q));
      total += exp2f(fmaf(sink - lse, log2e, workspace.offset[row]));
    }
    float delta = query_sum(smem + sum_floats, r) / total;
    if (params.d_lse.wanted)
      delta -= *reinterpret_cast<const float*>(params.d_lse.at(job.b, job.head_q, query));
    workspace.delta[row] = delta;
  }

  __device__ void compute_dmask(const PairJob& job, unsigned split) const {
    float sums[size] = {};
    for_each_four([&](int j, const float(&p)[4], const float(&dp)[4], const float* delta_smem) {
      const float2 delta = *reinterpret_cast<const float2*>(delta_smem);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[4 * j + e] = fmaf(p[e], dp[e] - (e % 2 == 0 ? delta.x : delta.y), sums[4 * j + e]);
      }
    });
    const MaskView& dmask = params.dmask;
    const auto store = [&](int query, int key, float value) {
      const std::int64_t i = dmask.extent[2] == 1 ? 0 : std::int64_t{job.tile} * c.queries + query;
      const std::int64_t j = dmask.extent[3] == 1 ? 0 : std::int64_t{job.key_tile} * c.keys + key;
      if (i >= dmask.extent[2] || j >= dmask.extent[3]) return;
      if (params.partial == nullptr) {
        store_element(dmask.at(job.b, job.head_q, i, j), dmask.dtype, value);
        return;
      }
      const std::int64_t head = (split * dmask.extent[0] + job.b) * dmask.extent[1] + job.head_q;
      params.partial[(head * dmask.extent[2] + i) * dmask.extent[3] + j] = value;
    };
    if (dmask.extent[2] != 1 && dmask.extent[3] != 1) {
#pragma unroll
      for (int n = 0; n < size; ++n) {
        store(place.first_query() + n / 4 * 8 + n % 2, place.first_key() + n % 4 / 2 * 8, sums[n]);
      }
      return;
    }
    auto* smem = reinterpret_cast<float*>(shared.k);
    sync_some<both_consumers, c.consumer_threads>();  // no product of either consumer reads K any more
    const auto thread = static_cast<int>(threadIdx.x);
    if (dmask.extent[3] == 1) {
      float x[query_count];
#pragma unroll
      for (int n = 0; n < query_count; ++n) x[n] = sums[n / 2 * 4 + n % 2] + sums[n / 2 * 4 + n % 2 + 2];
      add_keys(smem, x);
      sync_some<both_consumers, c.consumer_threads>();  // all warps have stored their sums
      if (dmask.extent[2] != 1) {
        if (thread < c.queries) store(thread, 0, query_sum(smem, thread));
      } else if (thread == 0) {
        float all = 0;
        for (int r = 0; r < c.queries; ++r) all += query_sum(smem, r);
        store(0, 0, all);
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = 0;
#pragma unroll
      for (int j = 0; j < size / 4; ++j) x += sums[4 * j + 2 * half] + sums[4 * j + 2 * half + 1];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (lane % 4 == 0) smem[(c.wide() ? warp / 4 : 0) * c.keys + place.first_key() + 8 * half] = x;
    }
    sync_some<both_consumers, c.consumer_threads>();  // all warps have stored their sums
    if (thread < c.keys) store(0, thread, c.wide() ? smem[thread] + smem[c.keys + thread] : smem[thread]);
  }
};

template <typename T, typename Table, int row, PairSum sum>
__global__ void __launch_bounds__(pair_config(Table::rows[row]).threads(), 1)
    pair_kernel(const __grid_constant__ PairParams params) {
  constexpr Config c = pair_config(Table::rows[row]);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(PairShared<c>::bytes(c.mask_bytes(4), true) <= most_shared_bytes);
  static_assert(c.dim == c.dim_v);  // V has the layout of K, and dO that of Q
  constexpr int dropout_warps = 2;
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  const ScoreParams& score = params.tile.score;
  const PairShared<c> shared(first_smem, score.mask_bytes(c), score.dropout);
  if (threadIdx.x == 0) {
    shared.init_barriers(dropout_warps);
    const DropoutMask kept = score.kept.drawn();
    *shared.words = {0, kept.key.low, kept.key.high, kept.stream};
  }
  let_next_kernel_start();
  __syncthreads();  // barriers and words are initialised
  const Sizes& sizes = params.tile.sizes;
  const int tiles = params.tile.workspace.tiles;
  const DmaskJobs& jobs = params.jobs;
  const PairJob job = sum == PairSum::delta ? PairJob::of_delta<c>(sizes, tiles, blockIdx.x)
                                            : PairJob::of_dmask<c>(sizes, jobs, tiles, blockIdx.x);
  if (threadIdx.x >= c.consumer_threads) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - c.consumer_warps;
    if (warp >= 2) {
      if (score.dropout) draw_pairs<c>(params, shared, warp - 2, dropout_warps);
    } else if (threadIdx.x == c.consumer_threads) {
      wait_for_previous_kernel();  // the other threads wait for the first tile that this thread publishes
      load_pairs<c, sum>(params, shared, job);
    }
    return;
  }
  const PairConsumer<T, c, sum> consumer{params, shared};
  if constexpr (sum == PairSum::delta) {
    consumer.compute_delta(job);
  } else {
    consumer.compute_dmask(job, blockIdx.x / jobs.per_split());
  }
#endif
}

/// Adds the sums of the CTAs that shared a tile of dmask, in order.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads)
    join_dmask_kernel(const __grid_constant__ MaskView dmask, const float* partial, int splits) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t count = dmask.extent[0] * dmask.extent[1] * dmask.extent[2] * dmask.extent[3];
  for (std::int64_t n = std::int64_t{blockIdx.x} * row_threads + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * row_threads) {
    float sum = 0;
    for (int split = 0; split < splits; ++split) sum += partial[split * count + n];
    const std::int64_t j = n % dmask.extent[3], i = n / dmask.extent[3] % dmask.extent[2];
    const std::int64_t bh = n / dmask.extent[3] / dmask.extent[2];
    store_element(dmask.at(bh / dmask.extent[1], bh % dmask.extent[1], i, j), dmask.dtype, sum);
  }
}

}  // namespace tilewise::cuda::wgmma_backward
