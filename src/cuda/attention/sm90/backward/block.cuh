#pragma once

#include "cuda/attention/common/backward/queries.cuh"
#include "cuda/attention/sm90/backward/tuning.h"
#include "cuda/attention/sm90/panel_tile.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::wgmma_backward {

using mma::BackwardBlocks;
using mma::BackwardSpace;
using mma::GroupFacts;
using mma::QuerySteps;

/// Fills a tile with the first `dims` elements of `valid` aligned rows that lie `stride` bytes apart;
/// everything else is zero. Copies are to be committed and awaited by the caller.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_panels(std::byte* tile_smem, const std::byte* first, std::int64_t stride,
                                            int valid, int dims, int thread) {
  using Tile = PanelTile<dim, count>;
  constexpr int step = threads / 8;  // rows between those of a thread, which has a chunk of each panel
  static_assert(step % 8 == 0 && count % step == 0);
  const int row = thread / 8;
  const int chunk = thread % 8;
  const std::byte* source = first + row * stride + chunk * 16;
  std::byte* to = tile_smem + Tile::offset(row, chunk);
  if (valid >= count && dims == dim) {
#pragma unroll 4
    for (int r = 0; r < count; r += step) {
#pragma unroll
      for (int panel = 0; panel < dim / 64; ++panel) {
        copy_async_16(to + panel * Tile::panel_bytes + r * 128, source + panel * 128, true);
      }
      source += step * stride;
    }
  } else {
#pragma unroll 1
    for (int r = 0; r < count; r += step) {
#pragma unroll 1
      for (int panel = 0; panel < dim / 64; ++panel) {
        const int bytes = row + r < valid ? max(0, min(16, (dims - panel * 64 - chunk * 8) * 2)) : 0;
        copy_async_part(to + panel * Tile::panel_bytes + r * 128, bytes > 0 ? source + panel * 128 : first,
                        bytes);
      }
      source += step * stride;
    }
  }
}

/// What a block knows. It lies in shared memory, and is read where it is needed: registers are scarcer.
struct Facts {
  GroupFacts group;
  int b, h;  ///< h of the keys
  int key_count;
  int first_key;  ///< in the sequence
  mma::GradientScale scale;
};
static_assert(sizeof(Facts) <= Config::fact_bytes);

/// And of a tile of queries, from when it is asked for until its dq is made.
struct TileFacts {
  std::int64_t sums;  ///< its first tile among the sums of dq
  int count;          ///< queries
  int low, high;      ///< keys that query r sees: r + low to r + high of the block's
  int edge;           ///< whether some do not see some of the keys
};
static_assert(sizeof(TileFacts) * Config::tile_facts <= Config::tile_bytes);

/// What a block has: its place in shared memory, and what it knows of its keys and of the queries.
template <typename T_, Config c>
struct Block {
  using T = T_;
  using KeyPanels = PanelTile<c.dim, c.keys>;
  using QueryPanels = PanelTile<c.dim, c.queries>;
  using PairPointer = MatrixPointer<c.queries>;

  const AttentionCall& call;
  const BackwardBlocks& blocks;
  const BackwardSpace& space;
  const int warp_ = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane_ = static_cast<int>(threadIdx.x) % 32;
  const float unit;         ///< from products to exponents of 2; never 0
  std::byte* k_smem;        ///< [keys, dim]
  std::byte* v_smem;        ///< [keys, dim]
  std::byte* q_smem;        ///< stages x [queries, dim]
  std::byte* d_o_smem;      ///< stages x [queries, dim]
  std::byte* dscores_smem;  ///< pair stages x [keys, queries]
  float* dq_smem;           ///< [warps, eights of dims, 128]: of 16 queries
  float* top_smem;          ///< stages x [queries]
  float* shift_smem;        ///< stages x [queries]
  Facts* facts_smem;
  TileFacts* tiles_smem;  ///< by the tile's number
  Mbarrier* full_smem;    ///< [stages]: queries are there
  Mbarrier* empty_smem;   ///< [stages]: nobody needs them any more
  Mbarrier* made_smem;    ///< [pair stages]: score gradients are there
  Mbarrier* used_smem;    ///< [pair stages]: nobody needs them any more

  __device__ Block(const AttentionCall& call_, const BackwardBlocks& blocks_, const BackwardSpace& space_,
                   std::byte* shared)
      : call(call_),
        blocks(blocks_),
        space(space_),
        unit(mma::exponent_unit(call.scale)),
        k_smem(shared),
        v_smem(k_smem + c.key_bytes()),
        q_smem(v_smem + c.key_bytes()),
        d_o_smem(q_smem + c.stages * c.query_bytes()),
        dscores_smem(d_o_smem + c.stages * c.query_bytes()),
        dq_smem(reinterpret_cast<float*>(dscores_smem + c.pair_stages * c.pair_bytes())),
        top_smem(dq_smem + c.consumers * c.dq_bytes() / 4),
        shift_smem(top_smem + c.stages * c.queries),
        facts_smem(reinterpret_cast<Facts*>(shift_smem + c.stages * c.queries)),
        tiles_smem(reinterpret_cast<TileFacts*>(reinterpret_cast<std::byte*>(facts_smem) + c.fact_bytes)),
        full_smem(reinterpret_cast<Mbarrier*>(reinterpret_cast<std::byte*>(tiles_smem) + c.tile_bytes)),
        empty_smem(full_smem + c.stages),
        made_smem(empty_smem + c.stages),
        used_smem(made_smem + c.pair_stages) {}

  /// What follows from these is computed where it is used.
  __device__ int lane() const { return opaque(lane_); }
  __device__ int warp() const { return warp_; }
  __device__ int group() const { return warp_ / 4; }  ///< the warpgroup
  __device__ int first_own_key() const { return 16 * warp_; }
  __device__ int dim_qk() const { return static_cast<int>(call.problem.dim_qk); }
  __device__ int dim_v() const { return static_cast<int>(call.problem.dim_v); }
  __device__ int key_count() const { return facts_smem->key_count; }
  __device__ std::int64_t first_key_row() const {  // cumulative lengths are those of ordered_starts.h
    return std::int64_t{facts_smem->first_key} + (call.packed() ? call.cumulative_k.at(facts_smem->b) : 0);
  }
  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  /// Facts and barriers, by the first thread; before a barrier of the block.
  __device__ void prepare(const Turn& turn, int share) const {
    if (threadIdx.x != 0) return;
    const auto among = turn.among(call.problem.heads_kv);
    const auto b = static_cast<int>(among.b);
    const auto h = static_cast<int>(among.h);
    const KeyTile keys = blocks.keys.tile(call, call.sequence(b), turn.tile);
    const auto first = static_cast<int>(keys.first);
    *facts_smem = {
        .group = GroupFacts::of<c.queries, c.keys>(call, blocks, space, b, h, first, keys.count, share),
        .b = b,
        .h = h,
        .key_count = keys.count,
        .first_key = first,
        .scale = mma::gradient_scale<T>(space.largest, 1.0f)};
    for (int n = 0; n < c.stages; ++n) {
      init_barrier(full_smem + n, c.load_warps);
      init_barrier(empty_smem + n, c.warps);
    }
    for (int n = 0; n < c.pair_stages; ++n) {
      init_barrier(made_smem + n, c.warps);
      init_barrier(used_smem + n, c.warps);
    }
    fence_barrier_inits();
  }
  __device__ QuerySteps begin() const {
    const GroupFacts& facts = facts_smem->group;
    return {uniform(facts.at), uniform(facts.head), uniform(facts.count)};
  }
  __device__ QuerySteps after(QuerySteps steps) const {
    steps.step(false, facts_smem->group.from, facts_smem->group.to);
    return steps;
  }

  __device__ const TileFacts& tile(int number) const { return tiles_smem[number % c.tile_facts]; }

  __device__ void load_keys() const {
    const std::int64_t s = first_key_row();
    const auto thread = static_cast<int>(threadIdx.x);
    load_panels<c.keys, c.dim, c.consumer_threads()>(k_smem,
                                                     row_of_halves(call.k, facts_smem->b, facts_smem->h, s),
                                                     call.k.stride_s * 2, key_count(), dim_qk(), thread);
    load_panels<c.keys, c.dim, c.consumer_threads()>(v_smem,
                                                     row_of_halves(call.v, facts_smem->b, facts_smem->h, s),
                                                     call.v.stride_s * 2, key_count(), dim_v(), thread);
  }
  /// Asks for a tile of queries, and says what there is to know of it. By the warps that load, of which a
  /// thread has a query's numbers.
  __device__ void load_queries(const QuerySteps& steps, int number, int stage) const {
    constexpr int threads = 32 * c.load_warps;
    static_assert(threads == c.queries);
    const auto thread = [] { return opaque(static_cast<int>(threadIdx.x) - c.consumer_threads()); };
    note_tile(steps, number, stage, thread());
    load_rows<threads>(q_smem + stage * c.query_bytes(), steps, facts_smem->group.q, call.q, dim_qk(),
                       thread());
    load_rows<threads>(d_o_smem + stage * c.query_bytes(), steps, facts_smem->group.d_o, call.d_o, dim_v(),
                       thread());
  }
  /// A warp is done with what a barrier guards, or has brought it.
  __device__ void arrive_once(Mbarrier* barrier_smem) const {
    __syncwarp();
    if (lane() == 0) arrive(barrier_smem);
  }

 private:
  template <int threads>
  __device__ __forceinline__ void load_rows(std::byte* to_smem, const QuerySteps& steps,
                                            const std::byte* group, const Rows& rows, int dims,
                                            int thread) const {
    const int at = opaque(steps.at) * c.queries;
    load_panels<c.queries, c.dim, threads>(
        to_smem, group + (opaque(steps.head) * rows.stride_h + at * rows.stride_s) * 2, rows.stride_s * 2,
        facts_smem->group.length - at, dims, thread);
  }
  __device__ __forceinline__ void note_tile(const QuerySteps& steps, int number, int stage, int r) const {
    const GroupFacts& facts = facts_smem->group;
    const int at = opaque(steps.at) * c.queries;
    const int count = min(c.queries, facts.length - at);
    const std::int64_t row = facts.row + opaque(steps.head) * call.rows_q() + at;
    float* top = top_smem + stage * c.queries + r;
    float* shift = shift_smem + stage * c.queries + r;
    if (r < count) {
      copy_async_4(top, space.rows.top + row + r);
      copy_async_4(shift, space.rows.shift + row + r);
    } else {  // one that saw nothing
      *top = -minus_infinity;
      *shift = 0;
    }
    if (r > 0) return;
    constexpr std::int64_t far = 1 << 20;  // beyond any tile, and no sum of it overflows
    tiles_smem[number % c.tile_facts] = {
        .sums = facts.tile + opaque(steps.head) * space.dq.tiles + steps.at * (c.queries / 16),
        .count = count,
        .low = static_cast<int>(max(-far, min(far, facts.low + at))),
        .high = static_cast<int>(max(-far, min(far, facts.high + at))),
        .edge = steps.at < facts.clear || steps.at >= facts.clear_end};
  }
};

// Weights and score gradients of a warpgroup's 64 keys by a tile of 64 queries, as they come out of wgmma: a
// lane has element e of eight j of the queries, (key lane / 4 + 8 (e / 2), query 8j + 2 (lane % 4) + e % 2).

using Pairs = float[32];
using Fragments = std::uint32_t[4][4];  ///< the same rounded, for products over queries, 16 of these each

/// Rows of keys or values in registers, as one factor.
template <int dim>
using RowFragments = std::uint32_t[dim / 16][4];

/// k·qᵀ or v·d_oᵀ of a tile.
template <typename T, int dim, int keys>
__device__ __forceinline__ void start_product(Pairs& sums, TileDescriptor rows, TileDescriptor queries) {
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    const int panel = step / 4, part = step % 4 * 2;
    WarpgroupProduct<T, 64>::from_shared(sums, rows + panel * (keys * 128 / 16) + part,
                                         queries + panel * (Config::queries * 128 / 16) + part, step > 0);
  }
}
template <typename T, int dim>
__device__ __forceinline__ void start_product(Pairs& sums, const RowFragments<dim>& rows,
                                              TileDescriptor queries) {
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    const int panel = step / 4, part = step % 4 * 2;
    WarpgroupProduct<T, 64>::template from_registers<0>(
        sums, rows[step], queries + panel * (Config::queries * 128 / 16) + part, step > 0);
  }
}
template <typename Block, int steps>
__device__ __forceinline__ void load_fragments(const Block& block, std::uint32_t (&to)[steps][4],
                                               const std::byte* rows_smem) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int lane = block.lane();
    load_matrices(to[step],
                  Block::address(rows_smem) +
                      Block::KeyPanels::offset(block.first_own_key() + lane % 16, 2 * step + lane / 16));
  }
}

/// Numbers of a lane's queries.
struct OfQueries {
  float2 value[8];

  __device__ __forceinline__ void load(const float* own_smem) {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = *reinterpret_cast<const float2*>(own_smem + 8 * j);
  }
  __device__ __forceinline__ float at(int index) const {
    return index % 2 == 0 ? value[index / 4].x : value[index / 4].y;
  }
};

/// d_o·v to x, d_o·v + shift, in the score gradients' scale over that of weights.
template <typename T>
__device__ __forceinline__ void add_shifts(const OfQueries& shifts, float scale_up, Pairs& x) {
  const float unit = scale_up / static_cast<float>(1 << mma::weight_bits<T>);
#pragma unroll
  for (int index = 0; index < 32; ++index) {
    const float own = shifts.at(index);
    x[index] = mma::weight_bits<T> > 0 ? fmaf(x[index], unit, own * unit) : x[index] + own;
  }
}

/// Hides what the band hides, and keys past the end.
template <typename Block>
__device__ __forceinline__ void hide(const Block& block, const TileFacts& queries, Pairs& s) {
  const float hidden = block.unit > 0 ? minus_infinity : -minus_infinity;
  const int own = opaque(block.first_own_key() + block.lane() / 4);
  const int low = opaque(queries.low);
  const int high = opaque(queries.high);
  const int key_count = block.key_count();
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    const int r = 8 * (q / 2) + 2 * (block.lane() % 4) + q % 2;
    hide_outside<WgmmaTransposedView<64>>(s, q, r + low - own, min(r + high, key_count) - own, hidden);
  }
}

/// Scores to weights, in the scale of weights.
template <typename T, int first, int end>
__device__ __forceinline__ void weigh(const OfQueries& tops, float unit, Pairs& s) {
#pragma unroll
  for (int index = first; index < end; ++index) {
    s[index] = exp2_approx(fmaf(s[index], unit, mma::weight_bits<T> - tops.at(index)));
  }
}

/// Weights and score gradients, rounded.
template <typename T>
__device__ __forceinline__ void round_pairs(const Pairs& p, const Pairs& x, Fragments& weights,
                                            Fragments& dscores) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    weights[n / 4][n % 4] = pack<T>(p[2 * n], p[2 * n + 1]);
    dscores[n / 4][n % 4] = pack<T>(p[2 * n] * x[2 * n], p[2 * n + 1] * x[2 * n + 1]);
  }
}

/// Fragments to their place in shared memory, [keys, queries].
template <typename Block>
__device__ __forceinline__ void store_pairs(const Block& block, int pair_stage, const Fragments& pairs) {
  const int lane = block.lane();
  const typename Block::PairPointer to{
      Block::address(block.dscores_smem + pair_stage * Config::pair_bytes()) +
      SwizzledTile<Config::queries>::offset(block.first_own_key() + lane % 16, lane / 16)};
#pragma unroll
  for (int step = 0; step < 4; ++step) store_matrices(to.at(0, step), pairs[step]);
}

}  // namespace tilewise::cuda::wgmma_backward
