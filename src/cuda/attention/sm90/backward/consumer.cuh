#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/sm90/backward/features.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::wgmma_backward {

// Consumers. S and dP are [64 keys, own queries]. Element 4j + e of lane 4g + t is that of key g + 8·(e / 2)
// of the warp's 16 and of query 8j + 2t + e % 2 of the consumer's.

/// `known` is the consumer's number where the two consumers have different shapes. Where it is −1, the number
/// comes from the thread's index.
template <typename T, Config c, int known = -1>
struct Consumer {
  static constexpr int dk_dims = c.own_dk_dims(known == 1 ? 1 : 0);
  static constexpr int dv_dims = c.own_dv_dims(known == 1 ? 1 : 0);
  static constexpr int dq_panels = c.dq_panels(known == 1 ? 1 : 0);
  using Scores = float[c.own_queries() / 2];
  /// P or dS rounded, as the A operand of dV or dK.
  using Fragments = std::uint32_t[c.own_queries() / 16][4];

  const TileParams& params;
  const Shared<c>& shared;
  const Walk& walk;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = known >= 0 ? known : warp / 4;
  const LanePlace<c> place{warp, lane};
  const float unit;  ///< factor that makes S an exponent of 2
  float dk[dk_dims / 2], dv[dv_dims / 2];

  __device__ Consumer(const TileParams& params_, const Shared<c>& shared_, const Walk& walk_)
      : params(params_), shared(shared_), walk(walk_), unit(exponent_unit(params.scale)) {}

  __device__ void arrive_once(Mbarrier* barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  /// Starts sums += P·dO or dS·Q, with P or dS [64 keys, queries] in registers. Without `add` it starts from
  /// 0.
  template <int size>
  __device__ __forceinline__ void start_gradient(float (&sums)[size], const Fragments& pairs,
                                                 const std::byte* rows_smem, bool add) {
    const TileDescriptor rows = shared.tile(rows_smem, Shared<c>::QueryPanels::panel_bytes);
#pragma unroll
    for (int step = 0; step < c.queries / 16; ++step) {
      WarpgroupProduct<T, 2 * size>::from_registers(sums, pairs[step], rows + step * 128, add || step > 0);
    }
    commit_products();
  }
  /// The same with P or dS of both consumers in shared memory, and the consumer's panels of dO or Q.
  template <int size>
  __device__ __forceinline__ void start_wide_gradient(float (&sums)[size], const std::byte* pairs_smem,
                                                      const std::byte* rows_smem, int first_panel, bool add) {
    using Panels = typename Shared<c>::QueryPanels;
    const TileDescriptor pairs = shared.tile(pairs_smem, Shared<c>::DsPanels::panel_bytes);
    const TileDescriptor rows =
        shared.tile(rows_smem + first_panel * Panels::panel_bytes, Panels::panel_bytes);
#pragma unroll
    for (int step = 0; step < c.queries / 16; ++step) {
      WarpgroupProduct<T, 2 * size>::template from_shared<0, 1>(sums, pairs + step * 2, rows + step * 128,
                                                                add || step > 0);
    }
    commit_products();
  }

  using DqPart = float[c.dq_queries() / 2];  ///< an accumulator of dQᵀ, [64 dims, dq_queries]
  /// Issues the product dQᵀ = Kᵀ·dSᵀ of a panel of K and a part of the queries of dS.
  __device__ __forceinline__ void issue_dq(DqPart& dq, const std::byte* ds_smem, int key_panel, int ds_part) {
    const TileDescriptor a = shared.tile(shared.k + key_panel * Shared<c>::KeyPanels::panel_bytes,
                                         Shared<c>::KeyPanels::panel_bytes);
    // A panel of dS has 64 queries; a consumer may have half of them.
    constexpr int ds_part_bytes = c.dq_queries() < 64 ? 2 * c.dq_queries() : Shared<c>::DsPanels::panel_bytes;
    const TileDescriptor b = shared.tile(ds_smem + ds_part * ds_part_bytes, Shared<c>::DsPanels::panel_bytes);
    forget(dq);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      WarpgroupProduct<T, c.dq_queries()>::template from_shared<1, 1>(dq, a + step * 128, b + step * 128,
                                                                      step > 0);
    }
  }
  __device__ __forceinline__ void start_dq(DqPart& dq, const std::byte* ds_smem, int key_panel, int ds_part) {
    issue_dq(dq, ds_smem, key_panel, ds_part);
    commit_products();
  }

  /// The element of S whose P is 0.
  __device__ float hidden_score() const { return unit > 0 ? minus_infinity : -minus_infinity; }
  __device__ __forceinline__ void hide(Scores& s, const Visible& visible) const {
    const float hidden = hidden_score();
#pragma unroll
    for (int n = 0; n < c.own_queries() / 2; ++n) {
      const int key = place.first_key() + n % 4 / 2 * 8;
      const int r = place.first_query() + n / 4 * 8 + n % 2;
      if (key < r + visible.low || key >= r + visible.high || key >= walk.key_count) s[n] = hidden;
    }
  }

  /// Notes in shared memory which of the warp's keys padding hides, where there is any.
  __device__ void note_hidden_keys() const {
    if (params.key_mask.data == nullptr) return;
    const int key = place.key + lane % 16;
    const bool hides = key < walk.key_count && !params.key_mask.shows(walk.entry.b, walk.first_key + key);
    const unsigned keys = __ballot_sync(~0u, hides);
    if (lane == 0) shared.words->hidden_keys[warp] = static_cast<std::uint16_t>(keys);
    __syncwarp();  // all lanes read it for each tile, so that it takes no register
  }
  __device__ __forceinline__ void hide_keys(Scores& s) const {
    const unsigned keys = static_cast<volatile Words*>(shared.words)->hidden_keys[warp];
    if (keys == 0) return;
    const float hidden = hidden_score();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((keys >> (lane / 4 + 8 * half) & 1) == 0) continue;
#pragma unroll
      for (int n = 2 * half; n < c.own_queries() / 2; n += 4) s[n] = s[n + 1] = hidden;
    }
  }
  /// Hides the pairs that a block mask's bits do not show.
  __device__ __forceinline__ void hide_unseen(Scores& s, int q_stage) const {
    const Step step = shared.steps[q_stage];  // read again, so that it takes no registers while products run
    if (step.block < 0) return;
    const StageOf at = mask_place<c>(params.score, step);
    wait(shared.mask_full + at.stage, at.parity);
    const float hidden = hidden_score();
    const LanePlace<c> own(warp, lane_now());
    for_each_seen_word<c>(params.score.blocks, shared.seen + at.stage * (c.seen_bytes() / 4), own,
                          [&](int n, bool seen) {
                            if (!seen) s[n] = hidden;
                          });
    arrive_once(shared.mask_empty + at.stage);
  }

  /// Replaces S by P, and rounds P, with 0 for pairs that dropout drops.
  __device__ __forceinline__ void compute_p(Scores& s, const float* lse_smem, Fragments& p_rounded,
                                            const std::uint32_t* kept_smem) const {
#pragma unroll
    for (int j = 0; j < c.own_queries() / 8; ++j) {
      float2 lse{};
      if constexpr (!c.preload) lse = *reinterpret_cast<const float2*>(lse_smem + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * j + e];
        x = exp2_approx(c.preload ? x * unit : fmaf(x, unit, e % 2 == 0 ? -lse.x : -lse.y));
      }
      float p[4] = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
      if constexpr (c.drops) {
        const KeptFour<c> kept(kept_smem, LanePlace<c>(warp, lane_now()), j);
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = kept.at(e) ? p[e] : 0.0f;
      }
      p_rounded[j / 2][j % 2 * 2] = pack<T>(p[0], p[1]);
      p_rounded[j / 2][j % 2 * 2 + 1] = pack<T>(p[2], p[3]);
    }
  }
  __device__ __forceinline__ void compute_ds(const Scores& p, Scores& dp, const float* delta_smem,
                                             Fragments& ds, const std::uint32_t* kept_smem) const {
#pragma unroll
    for (int j = 0; j < c.own_queries() / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(delta_smem + 8 * j);
      if constexpr (c.drops) {
        const KeptFour<c> kept(kept_smem, LanePlace<c>(warp, lane_now()), j);
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[4 * j + e] = kept.at(e) ? dp[4 * j + e] * params.dv_scale : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 4 * j + 2 * half;
        ds[j / 2][j % 2 * 2 + half] = pack<T>(p[n] * (dp[n] - delta.x), p[n + 1] * (dp[n + 1] - delta.y));
      }
    }
  }

  /// Stores P or dS of the consumer in shared memory, among those of both consumers.
  __device__ __forceinline__ void store_fragments(std::byte* to_smem, const Fragments& pairs) const {
#pragma unroll
    for (int step = 0; step < c.own_queries() / 16; ++step) {
      const int chunk = place.query / 8 + 2 * step + lane / 16;
      store_matrices(static_cast<std::uint32_t>(__cvta_generic_to_shared(
                         to_smem + Shared<c>::DsPanels::offset(place.key + lane % 16, chunk))),
                     pairs[step]);
    }
  }

  /// Stores a consumer's dQ, the `number`-th, in shared memory: each warp has 16 dims of each panel. The
  /// caller follows with a fence and publish_dq().
  template <int at_once>
  __device__ __forceinline__ void stage_dq(const DqPart (&dq)[at_once], int number) const {
    wait(shared.dq_empty + group, number % 2 ^ 1);
#pragma unroll
    for (int panel = 0; panel < at_once; ++panel) {
      float* to = shared.dq + (4 * panel + warp) * c.warp_dq_floats() + 4 * lane;
#pragma unroll
      for (int j = 0; j < c.dq_queries() / 8; ++j) {
        const float* four = dq[panel] + 4 * j;
        *reinterpret_cast<float4*>(to + 128 * j) = {four[0], four[1], four[2], four[3]};
      }
    }
  }
  __device__ __forceinline__ void stage_dq(const DqPart& dq, int number) const {
    stage_dq(reinterpret_cast<const DqPart(&)[1]>(dq), number);
  }
  __device__ __forceinline__ void publish_dq() const { arrive_once(shared.dq_full + group); }

  /// Zeroes rows of Q and dO past a packed sequence's end, which belong to another sequence. P is 0 there,
  /// but the rows may hold infinity or NaN, and 0 times these is NaN.
  __device__ __forceinline__ void clear_rows_past_end(const std::byte* q, const std::byte* d_o,
                                                      int tile) const {
    const int valid = walk.entry.length_q - tile * c.queries;
    if (!params.sizes.packed || valid >= c.queries) return;
    constexpr int chunks = Shared<c>::QueryPanels::chunks;
    static_assert(chunks >= Shared<c>::GradientPanels::chunks);
    // Where registers are short, the thread's number is read again, so that nothing derived from it stays in
    // registers while products run.
    const int thread = c.general ? 32 * warp + lane_now() : static_cast<int>(threadIdx.x);
    for (int index = thread; index < (c.queries - valid) * chunks; index += c.consumer_threads) {
      const int at = Shared<c>::QueryPanels::offset(valid + index / chunks, index % chunks);
      *reinterpret_cast<uint4*>(const_cast<std::byte*>(q) + at) = {};
      if (index % chunks < Shared<c>::GradientPanels::chunks) {
        *reinterpret_cast<uint4*>(const_cast<std::byte*>(d_o) + at) = {};
      }
    }
    fence_async_proxy();
    sync_some<both_consumers, c.consumer_threads>();  // both consumers have cleared their part
  }

  /// Computes P from S with the general kernel's score rules and masks. Returns a bit for each pair: whether
  /// dropout keeps it.
  __device__ __forceinline__ std::uint32_t compute_p_with_features(Scores& s, Fragments& p_rounded,
                                                                   const Visible& visible, const Step& step,
                                                                   int stage) const {
    const ScoreParams& score = params.score;
    const LanePlace<c> place(warp, lane_now());  // computed again, to take no registers while products run
    std::uint32_t kept = ~0u;
    if (score.dropout) {
      const StageOf at(step.n, score.kept_stages);
      wait(shared.kept_full + at.stage, at.parity);
      kept = kept_pairs<c>(shared.kept + at.stage * c.kept_words() * c.queries, place);
      arrive_once(shared.kept_empty + at.stage);
    }
    const Entry& entry = walk.entry;
    TileInputs<c> inputs{
        .score = score,
        .mask_smem = shared.mask + mask_place<c>(score, step).stage * score.mask_bytes(c),
        .lse_smem = shared.lse + stage * c.queries + place.first_query(),
        .offset_smem = shared.offset + stage * c.queries + place.first_query(),
        .place = place,
        .slope = score.alibi ? static_cast<float>(score.alibi_slopes.at(entry.b, step.head_q)) : 0.0f,
        .distance = step.tile * c.queries + place.first_query() + entry.length_k - entry.length_q -
                    (walk.first_key + place.first_key()),
        .visible = visible,
        .key_count = walk.key_count};
    MaskForm form = score.mask;
    const bool masked = has_mask<c>(score, step);
    const StageOf at = mask_place<c>(score, step);
    if (masked) {
      wait(shared.mask_full + at.stage, at.parity);
      if (c.listed && step.block >= 0) {
        inputs.seen = seen_pairs<c>(score.blocks, shared.seen + at.stage * (c.seen_bytes() / 4), place);
      }
      if (form == MaskForm::boolean && score.mask_rows < 64 && inputs.shows_all()) form = MaskForm::none;
    }
    // Each way of computing P has code of its own, so that a call pays for the features that it uses. At head
    // dims of 65 to 128 there is one way: with two of them ptxas already spills.
    if constexpr (c.late_dp()) {
      compute_p_general<T, true, c>(form, s, inputs, taking<true>(s, p_rounded, kept));
    } else if (score.has_rules() || (score.dropout && form != MaskForm::none)) {
      compute_p_general<T, true, c>(form, s, inputs, taking<true>(s, p_rounded, kept));
    } else if (score.dropout) {
      compute_p_general<T, MaskForm::none, false, c>(s, inputs, taking<true>(s, p_rounded, kept));
    } else {
      compute_p_general<T, false, c>(form, s, inputs, taking<false>(s, p_rounded, kept));
    }
    if (masked) arrive_once(shared.mask_empty + at.stage);
    return kept;
  }

  /// Replaces S by P times the derivative of softcap, the factor of dS. Rounds P, with 0 for dropped pairs.
  template <bool drops>
  static __device__ __forceinline__ auto taking(Scores& s, Fragments& p_rounded, std::uint32_t kept) {
    return [&s, &p_rounded, kept](int j, float(&p)[4], const float(&slope)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = p[e] * slope[e];
        if (drops && (kept >> (4 * j + e) & 1) == 0) p[e] = 0;
      }
      p_rounded[j / 2][j % 2 * 2] = pack<T>(p[0], p[1]);
      p_rounded[j / 2][j % 2 * 2 + 1] = pack<T>(p[2], p[3]);
    };
  }

  __device__ __forceinline__ void compute_ds_with_features(Fragments& ds, const Scores& p, const Scores& dp,
                                                           const float* delta_smem, std::uint32_t kept,
                                                           int head_q, int tile) const {
    const LanePlace<c> place(warp, lane_now());
    const MaskGradient dmask(params.score.dmask, walk, head_q, tile * c.queries, place);
    if (params.score.dmask.data != nullptr) {
      compute_ds_general<T, true, true, c>(ds, p, dp, delta_smem, kept, params.dv_scale, dmask, lane);
    } else if (c.late_dp() || params.score.dropout) {
      compute_ds_general<T, false, true, c>(ds, p, dp, delta_smem, kept, params.dv_scale, dmask, lane);
    } else {
      compute_ds_general<T, false, false, c>(ds, p, dp, delta_smem, kept, params.dv_scale, dmask, lane);
    }
  }

  /// The stages of a tile's Q and dO. One ring serves both if they have the same number of stages.
  struct At {
    Ring<c.q_stages> q;
    Ring<c.d_o_stages> own_d_o;
    __device__ const auto& d_o() const {
      if constexpr (c.q_stages == c.d_o_stages) {
        return q;
      } else {
        return own_d_o;
      }
    }
    __device__ void advance() {
      q.advance();
      own_d_o.advance();
    }
  };

  // The plain kernel.

  /// Sets an accumulator of S to a value for each query.
  __device__ __forceinline__ void preload(Scores& x, const float* values_smem) const {
    if constexpr (c.preload) {
#pragma unroll
      for (int j = 0; j < c.own_queries() / 8; ++j) {
        const float2 value = *reinterpret_cast<const float2*>(values_smem + 8 * j);
        x[4 * j] = x[4 * j + 2] = value.x;
        x[4 * j + 1] = x[4 * j + 3] = value.y;
      }
      pin(x);  // in registers before the product starts
    }
  }
  __device__ __forceinline__ const std::byte* q_smem(const At& at) const {
    return shared.q + at.q.stage() * c.q_bytes();
  }
  __device__ __forceinline__ const std::byte* d_o_smem(const At& at) const {
    return shared.d_o + at.d_o().stage() * c.d_o_bytes();
  }
  /// Waits for Q of a tile, if there is one.
  __device__ __forceinline__ void wait_for_q(const At& at, int tile, bool exists) const {
    if (!exists) return;
    wait(shared.q_full + at.q.stage(), at.q.parity());
    if (params.sizes.packed) {
      wait(shared.d_o_full + at.d_o().stage(), at.d_o().parity());
      clear_rows_past_end(q_smem(at), d_o_smem(at), tile);
    }
  }
  __device__ __forceinline__ void preload_lse(Scores& s, const At& at) const {
    preload(s, shared.lse + at.q.stage() * c.queries + place.first_query());
  }
  __device__ __forceinline__ void start_dp(Scores& dp, const At& at) const {
    wait(shared.d_o_full + at.d_o().stage(), at.d_o().parity());
    start_scores<T, c, c.dim_v>(dp, shared.v, d_o_smem(at), group);
  }
  /// Computes P and dS of tile n of the walk, whose products S and dP are in flight.
  __device__ __forceinline__ void compute_p_and_ds(Scores& s, Scores& dp, Fragments& p_rounded, Fragments& ds,
                                                   int n, int tile, const At& at) const {
    const Visible visible =
        c.listed ? shared.visible[at.q.stage()] : Visible::of<c>(params.sizes, walk, tile);
    wait_products<1>();  // S
    pin(s);
    if (!visible.all) hide(s, visible);
    if (params.key_mask.data != nullptr) hide_keys(s);
    if constexpr (c.listed) hide_unseen(s, at.q.stage());
    // With `turns`, the other consumer has its P and dS then.
    if constexpr (c.turns) sync_with_arrivals(first_turn + group);
    const StageOf drawn(n, c.drops ? params.score.kept_stages : 1);
    if constexpr (c.drops) wait(shared.kept_full + drawn.stage, drawn.parity);
    const std::uint32_t* kept_smem = shared.kept + drawn.stage * c.kept_words() * c.queries;
    compute_p(s, shared.lse + at.q.stage() * c.queries + place.first_query(), p_rounded, kept_smem);
    wait_products<0>();  // dP
    pin(dp);
    compute_ds(s, dp, shared.delta + at.d_o().stage() * c.queries + place.first_query(), ds, kept_smem);
    if constexpr (c.drops) arrive_once(shared.kept_empty + drawn.stage);
  }

  /// The mainloop of the plain kernel, where each consumer has keys of its own. No product is in flight from
  /// one tile to the next: otherwise ptxas would serialize all products.
  __device__ __forceinline__ void run_plain() {
    const int count = (walk.end_tile - walk.first_tile) * params.sizes.own_heads;
    if (!c.listed && count <= 0) return;
    const int key_panel = c.dim > 64 ? group : 0, ds_panel = c.dq_by_queries() ? group : 0;
    // Stage and parity of dS of tile n. For n = −1 the wait for "full" returns at once.
    const auto ds_stage = [](int n) { return n & 1; };
    const auto ds_parity = [](int n) { return static_cast<std::uint32_t>(n >> 1 & 1); };
    const auto ds_smem = [&](int n) { return shared.ds + ds_stage(n) * c.ds_bytes(); };
    At at;
    Scores s, dp;
    DqPart dq;
    Step step{.tile = walk.end_tile - 1};
    if constexpr (c.listed) {
      if (!next_step(step, at)) return;
    } else {
      wait_for_q(at, step.tile, true);
    }
    preload_lse(s, at);
    if (c.turns && group == 1) arrive_for_sync(first_turn);
    int n = 0;
    bool more = true;
#pragma unroll 1
    for (; c.listed ? more : n < count; ++n) {
      if constexpr (!c.listed) more = n + 1 < count;
      Fragments p_rounded, ds;
      start_scores<T, c, c.dim, c.preload>(s, shared.k, q_smem(at), group);
      start_dp(dp, at);
      compute_p_and_ds(s, dp, p_rounded, ds, n, step.tile, at);
      wait(shared.ds_empty + ds_stage(n), ds_parity(n) ^ 1);
      store_fragments(ds_smem(n), ds);
      fence_async_proxy();
      arrive_once(shared.ds_full + ds_stage(n));
      if (c.turns && (c.listed || more || group == 0)) arrive_for_sync(first_turn + 1 - group);
      wait(shared.ds_full + ds_stage(n - 1), ds_parity(n - 1));
      pin(p_rounded);
      pin(ds);
      fence_products();
      start_dq(dq, ds_smem(n - 1), key_panel, ds_panel);  // for the first tile, the result is dropped
      start_gradient(dv, p_rounded, d_o_smem(at), n > 0);
      start_gradient(dk, ds, q_smem(at), n > 0);
      At next = at;
      next.advance();
      if (--step.tile < walk.first_tile) step.tile = walk.end_tile - 1;
      wait_products<2>();  // dQ
      pin(dq);
      if (n > 0) {
        arrive_once(shared.ds_empty + ds_stage(n - 1));
        stage_dq(dq, n - 1);
      }
      wait_products<1>();  // dV
      arrive_once(shared.d_o_empty + at.d_o().stage());
      if constexpr (c.listed) {
        more = next_step(step, next);
      } else {
        wait_for_q(next, step.tile, more);
      }
      preload_lse(s, next);
      wait_products<0>();  // dK
      arrive_once(shared.q_empty + at.q.stage());
      if (n > 0) {
        fence_async_proxy();  // while products run, it would take longer
        publish_dq();
      }
      at = next;
    }
    // With lists, each consumer arrives once more than the other waits.
    if (c.listed && c.turns && group == 0) sync_with_arrivals(first_turn);
    wait(shared.ds_full + ds_stage(n - 1), ds_parity(n - 1));
    fence_products();
    start_dq(dq, ds_smem(n - 1), key_panel, ds_panel);
    wait_products<0>();
    pin(dq);
    stage_dq(dq, n - 1);
    fence_async_proxy();
    publish_dq();
  }

  /// Where tiles are published: waits for Q of the next tile and reads its Step. Returns false at the end of
  /// the walk.
  __device__ __forceinline__ bool next_step(Step& step, const At& at) const {
    const int q = at.q.stage();
    wait(shared.q_full + q, at.q.parity());
    step = shared.steps[q];
    if (step.tile < 0) return false;
    if (!c.listed && params.sizes.packed) {  // packed sequences take no block masks
      wait(shared.d_o_full + at.d_o().stage(), at.d_o().parity());
      clear_rows_past_end(q_smem(at), d_o_smem(at), step.tile);
    }
    return true;
  }

  /// The mainloop of the general kernel, with the same schedule.
  __device__ __forceinline__ void run_features() {
    const int key_panel = c.dim > 64 ? group : 0, ds_part = c.dq_by_queries() ? group : 0;
    const auto ds_stage = [](int n) { return n & 1; };
    const auto ds_parity = [](int n) { return static_cast<std::uint32_t>(n >> 1 & 1); };
    const auto ds_smem = [&](int n) { return shared.ds + ds_stage(n) * c.ds_bytes(); };
    At at;
    Step step;
    DqPart dq;
    int n = 0;
    if (c.turns && group == 1) arrive_for_sync(first_turn);
#pragma unroll 1
    for (; next_step(step, at); ++n) {
      step.n = n;  // the same number, which then needs only one register
      Scores s, dp;
      Fragments p_rounded, ds;
      const float* delta_smem = shared.delta + at.d_o().stage() * c.queries + place.first_query();
      start_scores<T, c, c.dim>(s, shared.k, q_smem(at), group);
      if constexpr (!c.late_dp()) start_dp(dp, at);
      wait_products<c.late_dp() ? 0 : 1>();  // S
      pin(s);
      // With `turns`, the other consumer has its P then.
      if constexpr (c.turns) sync_with_arrivals(first_turn + group);
      const std::uint32_t kept =
          compute_p_with_features(s, p_rounded, shared.visible[at.q.stage()], step, at.q.stage());
      if constexpr (c.late_dp()) {
        pin(p_rounded);
        start_dp(dp, at);
        start_gradient(dv, p_rounded, d_o_smem(at), n > 0);
      }
      if constexpr (c.turns) arrive_for_sync(first_turn + 1 - group);
      wait_products<c.late_dp() ? 1 : 0>();  // dP
      pin(dp);
      compute_ds_with_features(ds, s, dp, delta_smem, kept, step.head_q, step.tile);
      wait(shared.ds_empty + ds_stage(n), ds_parity(n) ^ 1);
      store_fragments(ds_smem(n), ds);
      fence_async_proxy();
      arrive_once(shared.ds_full + ds_stage(n));
      wait(shared.ds_full + ds_stage(n - 1), ds_parity(n - 1));
      if constexpr (!c.late_dp()) pin(p_rounded);
      pin(ds);
      fence_products();
      start_dq(dq, ds_smem(n - 1), key_panel, ds_part);  // for n = 0, the result is dropped
      if constexpr (!c.late_dp()) start_gradient(dv, p_rounded, d_o_smem(at), n > 0);
      start_gradient(dk, ds, q_smem(at), n > 0);
      if constexpr (c.late_dp()) {
        wait_products<2>();  // dV
        arrive_once(shared.d_o_empty + at.d_o().stage());
        wait_products<1>();  // dQ
      } else {
        wait_products<2>();  // dQ
      }
      pin(dq);
      if (n > 0) {
        arrive_once(shared.ds_empty + ds_stage(n - 1));
        stage_dq(dq, n - 1);
      }
      if constexpr (!c.late_dp()) {
        wait_products<1>();  // dV
        arrive_once(shared.d_o_empty + at.d_o().stage());
      }
      wait_products<0>();  // dK
      arrive_once(shared.q_empty + at.q.stage());
      if (n > 0) {
        fence_async_proxy();  // while products run, it would take longer
        publish_dq();
      }
      at.advance();
    }
    if (c.turns && group == 0)
      sync_with_arrivals(first_turn);  // pairs with the other consumer's last arrival
    if (n == 0) return;
    wait(shared.ds_full + ds_stage(n - 1), ds_parity(n - 1));
    fence_products();
    start_dq(dq, ds_smem(n - 1), key_panel, ds_part);
    wait_products<0>();
    pin(dq);
    stage_dq(dq, n - 1);
    fence_async_proxy();
    publish_dq();
  }

  /// The mainloop where consumers split S and dP by queries, and dK, dV and dQ by dims (`wide`), with or
  /// without features.
  __device__ __forceinline__ void run_wide() {
    const int count = (walk.end_tile - walk.first_tile) * params.sizes.own_heads;
    if (!c.published() && count <= 0) return;
    constexpr int at_once = c.dq_panels_at_once(known == 1 ? 1 : 0), rounds = dq_panels / at_once;
    const int dq_panel = c.first_dq_panel(group);
    At at;
    Scores s, dp;
    DqPart dq[at_once];
    const auto start_dq_panels = [&](const std::byte* ds_smem, int first) {
#pragma unroll
      for (int panel = 0; panel < at_once; ++panel) issue_dq(dq[panel], ds_smem, dq_panel + first + panel, 0);
      commit_products();
    };
    Step step{.tile = walk.end_tile - 1};
    if constexpr (!c.published()) {
      wait_for_q(at, step.tile, true);
      preload_lse(s, at);
    }
#pragma unroll 1
    for (int n = 0; c.published() ? next_step(step, at) : n < count; ++n) {
      if constexpr (c.published()) preload_lse(s, at);
      std::byte* p_smem = shared.p + n % c.ds_stages * c.ds_bytes();
      std::byte* ds_smem = shared.ds + n % c.ds_stages * c.ds_bytes();
      Fragments p_rounded, ds;
      start_scores<T, c, c.dim, c.preload>(s, shared.k, q_smem(at), group);
      start_dp(dp, at);
      if constexpr (c.general) {
        wait_products<1>();  // S
        pin(s);
        const std::uint32_t kept =
            compute_p_with_features(s, p_rounded, shared.visible[at.q.stage()], step, at.q.stage());
        store_fragments(p_smem, p_rounded);
        wait_products<0>();  // dP
        pin(dp);
        const float* delta_smem = shared.delta + at.d_o().stage() * c.queries + place.first_query();
        compute_ds_with_features(ds, s, dp, delta_smem, kept, step.head_q, step.tile);
      } else {
        compute_p_and_ds(s, dp, p_rounded, ds, n, step.tile, at);
        store_fragments(p_smem, p_rounded);
      }
      store_fragments(ds_smem, ds);
      fence_async_proxy();
      At next = at;
      next.advance();
      if (--step.tile < walk.first_tile) step.tile = walk.end_tile - 1;
      // P and dS of both consumers are stored. Both have completed the products of the previous tile, whose
      // stage the next tile overwrites.
      sync_some<both_consumers, c.consumer_threads>();
      fence_products();
      start_wide_gradient(dv, p_smem, d_o_smem(at), c.first_dv_panel(group), n > 0);
      start_dq_panels(ds_smem, 0);
      wait_products<1>();  // dV
      arrive_once(shared.d_o_empty + at.d_o().stage());
      start_wide_gradient(dk, ds_smem, q_smem(at), c.first_dk_panel(group), n > 0);
      if constexpr (!c.published()) {
        wait_for_q(next, step.tile, n + 1 < count);
        preload_lse(s, next);
      }
      wait_products<1>();  // dQ
#pragma unroll
      for (int panel = 0; panel < at_once; ++panel) pin(dq[panel]);
      stage_dq(dq, n * rounds);
      if constexpr (rounds == 2) {
        fence_products();
        start_dq_panels(ds_smem, 1);
        wait_products<1>();  // dK
        arrive_once(shared.q_empty + at.q.stage());
        fence_async_proxy();
        publish_dq();
        wait_products<0>();  // dQ
        pin(dq[0]);
        stage_dq(dq, n * rounds + 1);
      } else {
        wait_products<0>();  // dK
        arrive_once(shared.q_empty + at.q.stage());
      }
      fence_async_proxy();
      publish_dq();
      at = next;
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < dk_dims / 2; ++n) dk[n] = 0;
#pragma unroll
    for (int n = 0; n < dv_dims / 2; ++n) dv[n] = 0;
    if constexpr (!c.general) note_hidden_keys();
    if constexpr (c.wide()) {
      run_wide();
    } else if constexpr (c.general) {
      run_features();
    } else {
      run_plain();
    }
    pin(dk);
    pin(dv);
  }

  /// Rounds a consumer's part of dK or dV and stores it in shared memory.
  template <int size>
  __device__ __forceinline__ void stage_rows(std::byte* to_smem, const float (&sums)[size], int first_chunk,
                                             float factor) const {
#pragma unroll
    for (int n = 0; n < size / 2; ++n) {  // pairs of dims
      const int row = place.first_key() + n % 2 * 8;
      *reinterpret_cast<std::uint32_t*>(to_smem + Shared<c>::KeyPanels::offset(row, first_chunk + n / 2) +
                                        4 * (lane % 4)) =
          pack<T>(sums[2 * n] * factor, sums[2 * n + 1] * factor);
    }
  }
  /// Copies dK or dV from shared memory to global memory.
  __device__ void store_rows(const Rows& rows, int dims, const std::byte* from_smem) const {
    using Panels = typename Shared<c>::KeyPanels;
    if (!rows.wanted) return;
    std::byte* first = row_of_halves(rows, walk.entry.place, walk.head, walk.entry.first_k + walk.first_key);
    const int count = walk.template written<c>(params.sizes);
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < c.keys * Panels::chunks;
         index += c.consumer_threads) {
      const int row = index / Panels::chunks, chunk = index % Panels::chunks;
      if (row >= count || chunk * 8 >= dims) continue;
      *reinterpret_cast<uint4*>(first + row * rows.stride_s * 2 + chunk * 16) =
          *reinterpret_cast<const uint4*>(from_smem + Panels::offset(row, chunk));
    }
  }
  /// Writes dK or dV in f32, which a split and a piece of a whole have, from registers to global memory.
  template <int size>
  __device__ void store_rows_f32(const Rows& rows, int dims, const float (&sums)[size], int first_chunk,
                                 float factor) const {
    if (!rows.wanted) return;
    std::byte* first = rows.at(walk.entry.place, walk.head, walk.entry.first_k + walk.first_key);
    const int count = walk.template written<c>(params.sizes);
#pragma unroll
    for (int n = 0; n < size / 2; ++n) {  // pairs of dims
      const int row = place.first_key() + n % 2 * 8, dim = (first_chunk + n / 2) * 8 + 2 * (lane % 4);
      if (row >= count || dim >= dims) continue;
      *reinterpret_cast<float2*>(first + (row * rows.stride_s + dim) * 4) = {sums[2 * n] * factor,
                                                                             sums[2 * n + 1] * factor};
    }
  }
  __device__ __forceinline__ void store_gradients() const {
    const int dk_chunk = c.wide() ? 8 * c.first_dk_panel(group) : 0;
    const int dv_chunk = c.wide() ? 8 * c.first_dv_panel(group) : 0;
    const bool dk_is_f32 = params.dk.dtype == DType::f32, dv_is_f32 = params.dv.dtype == DType::f32;
    if (dk_is_f32) store_rows_f32(params.dk, params.sizes.dim_qk, dk, dk_chunk, params.scale);
    if (dv_is_f32) store_rows_f32(params.dv, params.sizes.dim_v, dv, dv_chunk, params.dv_scale);
    sync_some<both_consumers,
              c.consumer_threads>();  // no product of either consumer reads the buffers any more
    stage_rows(shared.k, dk, dk_chunk, params.scale);
    stage_rows(shared.v, dv, dv_chunk, params.dv_scale);
    sync_some<both_consumers, c.consumer_threads>();  // both consumers have stored their rows
    if (!dk_is_f32) store_rows(params.dk, params.sizes.dim_qk, shared.k);
    if (!dv_is_f32) store_rows(params.dv, params.sizes.dim_v, shared.v);
  }
};

}  // namespace tilewise::cuda::wgmma_backward
