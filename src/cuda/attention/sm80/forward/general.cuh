#pragma once

#include <new>
#include <type_traits>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/forward/forward.cuh"
#include "cuda/attention/sm80/forward/general_scores.cuh"
#include "cuda/attention/sm80/forward/key_order.cuh"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/local.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// The general kernel: masks, ALiBi, softcap, dropout, block masks, pages, and rows that lie anyhow. As the
// plain one, but for the order of the keys in a tile (KeyOrder), and for what a block knows, which lies in
// shared memory. What a call does not have costs a branch a tile.

/// Keys or values of a block's head that lie at a stride.
struct StridedKeys {
  const std::byte* first = nullptr;  ///< key 0 of the sequence; null where they are not aligned, or in pages
  std::int64_t stride = 0;           ///< bytes

  __device__ StridedKeys(const AttentionCall& call, const QueryRows& at, const Rows& rows, bool whole_rows)
      : stride(rows.stride_s * 2) {
    if (call.problem.layout == Layout::paged || !whole_rows || !aligned_chunks(rows)) return;
    first = row_of_halves(rows, at.queries.b, at.head_kv, at.queries.sequence.first_k);
  }
};

/// What all threads of a block know in the general kernel. It lies in shared memory: it is much, seldom asked
/// for, and registers are wanted for scores and a mask's elements.
struct ForwardFacts {
  QueryRows rows;
  KeyTiles<true> tiles;
  StridedKeys k, v;
  DropoutMask dropout;
  KeyTile ahead[2];  ///< see TilesAhead

  __device__ ForwardFacts(const AttentionCall& call, const QueryRows& rows_, const ForwardConfig& c)
      : rows(rows_),
        tiles(call, rows_.queries, c.keys),
        k(call, rows_, call.k, call.problem.dim_qk == c.dim),
        v(call, rows_, call.v, call.problem.dim_v == c.dim) {
    if (call.problem.features.dropout) dropout = call.dropout.drawn();
  }
};
static_assert(sizeof(ForwardFacts) <= ForwardConfig::fact_bytes);

/// A block's tiles of keys after one another. Between two calls of take() there is a barrier: one thread
/// looks for a tile, in lists where there is a block mask, while the others compute those before.
class TilesAhead {
 public:
  __device__ explicit TilesAhead(ForwardFacts& facts_smem) : facts_smem_(facts_smem) {}
  __device__ KeyTile take() {
    const KeyTile& place = facts_smem_.ahead[turn_];
    const KeyTile tile{uniform(place.first), uniform(place.count), uniform(place.tile)};
    turn_ ^= 1;  // everyone read that one before the last barrier
    if (threadIdx.x == 0) facts_smem_.ahead[turn_] = facts_smem_.tiles.next();
    return tile;
  }

 private:
  ForwardFacts& facts_smem_;
  int turn_ = 0;
};

/// How rows come into shared memory.
template <ForwardConfig c>
struct GeneralLoader {
  const AttentionCall& call;
  const ForwardFacts& facts;

  __device__ void queries(std::byte* to_smem) const {
    const QueryRows& rows = facts.rows;
    load_any_rows<c.rows(), c.dim, c.threads()>(
        to_smem, [&](int r) { return rows.row_of(call.q, r); }, aligned_chunks(call.q), rows.count(),
        static_cast<int>(call.problem.dim_qk));
  }
  __device__ __forceinline__ void keys(const KeyTile& tile, std::byte* to_smem) const {
    load(facts.k, call.k, tile, static_cast<int>(call.problem.dim_qk), to_smem);
  }
  __device__ __forceinline__ void values(const KeyTile& tile, std::byte* to_smem) const {
    load(facts.v, call.v, tile, static_cast<int>(call.problem.dim_v), to_smem);
  }

 private:
  __device__ __forceinline__ void load(const StridedKeys& strided, const Rows& from, const KeyTile& tile,
                                       int dims, std::byte* to_smem) const {
    if (strided.first != nullptr && tile.count == c.keys) {  // what there mostly is
      return load_strided_keys<c.keys, c.dim, c.threads()>(
          to_smem, strided.first + tile.first * strided.stride, strided.stride);
    }
    const QueryTile& queries = facts.rows.queries;
    const auto row = [&](int key) {
      return call.key_row(from, queries.sequence, queries.b, facts.rows.head_kv, tile.first + key);
    };
    if (tile.count == c.keys && dims == c.dim && aligned_chunks(from) && in_one_page(tile)) {
      return load_strided_keys<c.keys, c.dim, c.threads()>(to_smem, row(0), from.stride_s * 2);
    }
    load_any_rows<c.keys, c.dim, c.threads(), KeyOrder>(to_smem, row, aligned_chunks(from), tile.count, dims);
  }
  /// Whether its keys lie at a stride, of which those outside pages that do were met before.
  __device__ bool in_one_page(const KeyTile& tile) const {
    if (call.problem.layout != Layout::paged) return false;
    return static_cast<std::uint32_t>(tile.first) % static_cast<std::uint32_t>(call.page) + tile.count <=
           static_cast<std::uint32_t>(call.page);
  }
};

/// What a block has: its queries, the sums of its softmax, and two stages of keys and of values. One computes
/// while the other is filled, and one barrier a tile says both that a stage is there and that one is free.
template <typename T, ForwardConfig c>
struct GeneralBlock {
  const AttentionCall& call;
  const QueryRows& rows;
  const GeneralLoader<c> load;
  const ScoreRule rules;
  const Exponents<true> exponents;
  const SeenByAll all;
  const bool exact_weights;  ///< what they lost in rounding is multiplied, too: see few_results()
  const Place<c> place{};
  const BlockSpace<c> space;
  const MaskRows<c, T> mask;
  const DropoutMask& drawn;
  Output<c> o = {};
  SoftmaxRows<c> softmax{};
  TileSums<c> own;  ///< of the tile at hand

  __device__ GeneralBlock(const AttentionCall& call_, const ForwardFacts& facts, bool exact_weights_,
                          std::byte* shared)
      : call(call_),
        rows(facts.rows),
        load{call, facts},
        rules(call, rows.queries.b, rows.queries.h),
        exponents{log2e, std::is_same_v<T, __half> ? 7.0f : 0.0f},  // of weights of 2^8 at most
        all(call, rows),
        exact_weights(exact_weights_),
        space(shared),
        mask(call, rows, place),
        drawn(facts.dropout) {}

  __device__ Queries<c> queries() const {
    Queries<c> q{space.queries_of(place)};
    q.load();
    return q;
  }

  /// Scores of a tile from its products, the maxima raised. `fours` is what there was to be loaded ahead.
  __device__ __forceinline__ void start_softmax(const KeyTile& keys, const Fours<c>& fours, Scores<c>& s) {
    make_scores<c>(call, rules, rows, keys, all.ends_in(keys, c.keys), place, mask, fours, s);
    raise_maxima<c, true>(s, exponents, softmax, o);
    own.begin(exponents, softmax);
  }
  __device__ __forceinline__ void weigh(Weights<c>& weights, const Scores<c>& s, int step) {
    mma::weigh<T, c, true>(weights, s, step, exponents, own.references, own.sums);
  }
  __device__ __forceinline__ void add_values(const Weights<c>& weights, int step,
                                             const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, weights);
    multiply_values<T, c>(o, weights, v, step);
  }
  /// The same without what dropout does not keep.
  __device__ __forceinline__ void add_kept(Weights<c>& weights, const Weights<c>& kept, int step,
                                           const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, weights);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) weights[r][n] &= kept[r][n];
    }
    multiply_values<T, c>(o, weights, v, step);
  }

  /// Weights of 16 keys are made beside the product of those before.
  template <typename Add>
  __device__ __forceinline__ void weigh_steps(const Scores<c>& s, const Add& add) {
    Weights<c> weights[2];
    weigh(weights[0], s, 0);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      if (step + 1 < c.keys / 16) weigh(weights[(step + 1) % 2], s, step + 1);
      add(weights[step % 2], step);
    }
  }

  /// All of a tile after its products. What the next one's scores need is loaded beside it.
  __device__ __forceinline__ void weigh_and_add(const KeyTile& keys, const KeyTile& next, Fours<c>& fours,
                                                Scores<c>& s, const MatrixPointer<c.dim>& v) {
    start_softmax(keys, fours, s);
    if (next.count > 0) mask.load(fours, next);
    const bool dropping = call.problem.features.dropout;
    if (exact_weights || (dropping && keys.first % 4 != 0)) {
      add_carefully(keys, s, v);
    } else if (dropping) {
      const DropoutRows<c> dropout(call, drawn, rows, place, keys);
      weigh_steps(s, [&](Weights<c>& weights, int step) {
        Weights<c> kept;
        dropout.keep(kept, step);
        add_kept(weights, kept, step, v);
      });
    } else {
      weigh_steps(s, [&](const Weights<c>& weights, int step) { add_values(weights, step, v); });
    }
    own.add_to(softmax);
  }
  /// What is seldom asked for: with exact weights, what they lost in rounding is multiplied, too.
  __device__ __forceinline__ void add_carefully(const KeyTile& keys, const Scores<c>& s,
                                                const MatrixPointer<c.dim>& v) {
    const DropoutRows<c> dropout(call, drawn, rows, place, keys);
    weigh_steps(s, [&](Weights<c>& weights, int step) {
      Weights<c> lost, kept;
      weigh_lost<T, c, true>(lost, weights, s, step, exponents, own.references);
#pragma unroll
      for (int n = 0; n < 4 * c.row_tiles; ++n) kept[n / 4][n % 4] = ~0u;
      if (call.problem.features.dropout) dropout.keep_singly(kept, step);
      if (exact_weights) add_kept(lost, kept, step, v);
      add_kept(weights, kept, step, v);
    });
  }

  /// q·k of a tile: with exact weights 16 dims at a time.
  __device__ __forceinline__ void multiply_all(Products<T, c>& products, const Queries<c>& q,
                                               const MatrixPointer<c.dim>& k) const {
    if (exact_weights) {
#pragma unroll
      for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, true);
    } else {
#pragma unroll
      for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, false);
    }
  }

  /// A tile after another: products, then softmax beside the product with values.
  __device__ void walk(TilesAhead& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.keys_at(0));
    load.values(keys, space.values_at(0));
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // queries are there
    const Queries<c> q = queries();
    const auto seen_first = static_cast<int>(seen_by_warp<c>(*this).first);
    const auto seen_last = static_cast<int>(seen_by_warp<c>(*this).last);
    Fours<c> fours;
    mask.load(fours, keys);
#pragma unroll 1
    for (int stage = 0; keys.count > 0; stage ^= 1) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one
      const KeyTile next = tiles.take();
      if (next.count > 0) {
        load.keys(next, space.keys_at(stage ^ 1));
        load.values(next, space.values_at(stage ^ 1));
      }
      commit_copies();
      const auto first = static_cast<int>(keys.first);
      if (first < seen_last && first + keys.count > seen_first) {
        const auto k = MatrixPointer<c.dim>::by_columns(space.address(space.keys_at(stage)));
        Products<T, c> products;
        multiply_all(products, q, k);
        weigh_and_add(keys, next, fours, products.sum(),
                      MatrixPointer<c.dim>::by_rows(space.address(space.values_at(stage))));
      } else if (next.count > 0) {
        mask.load(fours, next);
      }
      keys = next;
    }
  }
};

/// The kernel of one row of a table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    general_kernel(const __grid_constant__ AttentionCall call, const QueryBlocks blocks,
                   const Splits splits) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(Table::general && c.stages == 2);
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  auto& facts_smem = *reinterpret_cast<ForwardFacts*>(shared + c.shared_bytes(false));
  const auto split = static_cast<int>(blockIdx.y);
  if (threadIdx.x == 0) {
    new (&facts_smem) ForwardFacts(call, blocks.rows(call, blockIdx.x), c);
    if (c.split_kv && splits.count > 1) facts_smem.tiles.keep_split(split, splits.count);
    facts_smem.ahead[0] = facts_smem.tiles.next();
  }
  __syncthreads();  // the facts are there
  const QueryRows& rows = facts_smem.rows;
  if (rows.queries.count <= 0) return;
  GeneralBlock<T, c> block(call, facts_smem, blocks.exact_weights, shared);
  TilesAhead tiles(facts_smem);
  const KeyTile first = tiles.take();
  if (first.count > 0) block.walk(tiles, first);
  if constexpr (c.split_kv) {
    if (splits.count > 1) {
      return store_split<c, true>(call, splits, split, rows, block.exponents, block.place, block.o,
                                  block.softmax);
    }
  }
  finish<T, c, true>(call, rows, block.exponents, block.place, block.o, block.softmax, block.space.q_smem);
#endif
}

}  // namespace tilewise::cuda::mma
