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

// The general kernel: masks, ALiBi, softcap, dropout, block masks, paged keys, and rows of any stride and
// alignment. It differs from the plain one in the order of the keys in a tile (KeyOrder) and keeps what a CTA
// knows in shared memory. A feature that the call does not have costs one branch per tile.

/// K or V of a CTA's head where its rows have one stride.
struct StridedKeys {
  const std::byte* first = nullptr;  ///< key 0 of the sequence; null where rows are not aligned, or paged
  std::int64_t stride = 0;           ///< in bytes

  __device__ StridedKeys(const AttentionCall& call, const QueryRows& at, const Rows& rows, bool whole_rows)
      : stride(rows.stride_s * 2) {
    if (call.problem.layout == Layout::paged || !whole_rows || !aligned_chunks(rows)) return;
    first = row_of_halves(rows, at.queries.b, at.head_kv, at.queries.sequence.first_k);
  }
};

/// What all threads of a CTA know. It is in shared memory: it is large and rarely read, and registers are
/// needed for scores and for elements of the mask.
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

/// The K tiles of a CTA, one after another. There is a barrier between two calls of take(): one thread
/// searches the next tile, in lists where there is a block mask, while the others compute the tiles before
/// it.
class TilesAhead {
 public:
  __device__ explicit TilesAhead(ForwardFacts& facts_smem) : facts_smem_(facts_smem) {}
  __device__ KeyTile take() {
    const KeyTile& place = facts_smem_.ahead[slot_];
    const KeyTile tile{uniform(place.first), uniform(place.count), uniform(place.tile)};
    slot_ ^= 1;  // all threads read this slot before the last barrier
    if (threadIdx.x == 0) facts_smem_.ahead[slot_] = facts_smem_.tiles.next();
    return tile;
  }

 private:
  ForwardFacts& facts_smem_;
  int slot_ = 0;
};

/// Loads tiles into shared memory.
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
    if (strided.first != nullptr && tile.count == c.keys) {  // the usual case
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
  /// Whether a paged tile lies in one page, so that its rows have one stride. Tiles that are not paged were
  /// handled before.
  __device__ bool in_one_page(const KeyTile& tile) const {
    if (call.problem.layout != Layout::paged) return false;
    return static_cast<std::uint32_t>(tile.first) % static_cast<std::uint32_t>(call.page) + tile.count <=
           static_cast<std::uint32_t>(call.page);
  }
};

/// The state of a CTA: its queries, O and the sums of its softmax, and two stages of K and V. One stage is
/// computed while the other is filled. One barrier per tile says both that a stage has arrived and that the
/// other is free.
template <typename T, ForwardConfig c>
struct GeneralCta {
  const AttentionCall& call;
  const QueryRows& rows;
  const GeneralLoader<c> load;
  const ScoreRule rules;
  const Exponents<true> exponents;
  const SeenByAll all;
  const bool exact_p;  ///< P's rounding errors are multiplied by V, too: see keeps_p_exact()
  const Place<c> place{};
  const CtaTiles<c> space;
  const MaskRows<c, T> mask;
  const DropoutMask& drawn;
  Output<c> o = {};
  SoftmaxRows<c> softmax{};
  TileSums<c> tile_sums;  ///< of the current tile

  __device__ GeneralCta(const AttentionCall& call_, const ForwardFacts& facts, bool exact_p_,
                        std::byte* shared)
      : call(call_),
        rows(facts.rows),
        load{call, facts},
        rules(call, rows.queries.b, rows.queries.h),
        exponents{log2e, std::is_same_v<T, __half> ? 7.0f : 0.0f},  // f16 holds P of at most 2^8 times 2^7
        all(call, rows),
        exact_p(exact_p_),
        space(shared),
        mask(call, rows, place),
        drawn(facts.dropout) {}

  __device__ Queries<c> queries() const {
    Queries<c> q{space.queries_of(place)};
    q.load();
    return q;
  }

  /// Turns products into scores and raises the maxima. `fours` has the elements of the mask, which were
  /// loaded ahead.
  __device__ __forceinline__ void start_softmax(const KeyTile& keys, const Fours<c>& fours, Scores<c>& s) {
    make_scores<c>(call, rules, rows, keys, all.ends_in(keys, c.keys), place, mask, fours, s);
    raise_maxima<c, true>(s, exponents, softmax, o);
    tile_sums.begin(exponents, softmax);
  }
  __device__ __forceinline__ void exponentiate(Probabilities<c>& p, const Scores<c>& s, int step) {
    mma::exponentiate<T, c, true>(p, s, step, exponents, tile_sums.references, tile_sums.sums);
  }
  __device__ __forceinline__ void add_values(const Probabilities<c>& p, int step,
                                             const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, p);
    multiply_values<T, c>(o, p, v, step);
  }
  /// The same without the elements of P that dropout drops.
  __device__ __forceinline__ void add_kept(Probabilities<c>& p, const Probabilities<c>& kept, int step,
                                           const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, p);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) p[r][n] &= kept[r][n];
    }
    multiply_values<T, c>(o, p, v, step);
  }

  /// P of 16 keys is computed between the products of the 16 before.
  template <typename Add>
  __device__ __forceinline__ void exponentiate_steps(const Scores<c>& s, const Add& add) {
    Probabilities<c> p[2];
    exponentiate(p[0], s, 0);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      if (step + 1 < c.keys / 16) exponentiate(p[(step + 1) % 2], s, step + 1);
      add(p[step % 2], step);
    }
  }

  /// Softmax and P·V of a tile. Meanwhile the next tile's elements of the mask are loaded.
  __device__ __forceinline__ void softmax_and_add(const KeyTile& keys, const KeyTile& next, Fours<c>& fours,
                                                  Scores<c>& s, const MatrixPointer<c.dim>& v) {
    start_softmax(keys, fours, s);
    if (next.count > 0) mask.load(fours, next);
    const bool dropping = call.problem.features.dropout;
    if (exact_p || (dropping && keys.first % 4 != 0)) {
      add_exactly(keys, s, v);
    } else if (dropping) {
      const DropoutRows<c> dropout(call, drawn, rows, place, keys);
      exponentiate_steps(s, [&](Probabilities<c>& p, int step) {
        Probabilities<c> kept;
        dropout.keep(kept, step);
        add_kept(p, kept, step, v);
      });
    } else {
      exponentiate_steps(s, [&](const Probabilities<c>& p, int step) { add_values(p, step, v); });
    }
    tile_sums.add_to(softmax);
  }
  /// The rare cases: P kept exact, by multiplying its rounding errors, too; and dropout whose draws are not
  /// aligned.
  __device__ __forceinline__ void add_exactly(const KeyTile& keys, const Scores<c>& s,
                                              const MatrixPointer<c.dim>& v) {
    const DropoutRows<c> dropout(call, drawn, rows, place, keys);
    exponentiate_steps(s, [&](Probabilities<c>& p, int step) {
      Probabilities<c> lost, kept;
      rounding_errors<T, c, true>(lost, p, s, step, exponents, tile_sums.references);
#pragma unroll
      for (int n = 0; n < 4 * c.row_tiles; ++n) kept[n / 4][n % 4] = ~0u;
      if (call.problem.features.dropout) dropout.keep_singly(kept, step);
      if (exact_p) add_kept(lost, kept, step, v);
      add_kept(p, kept, step, v);
    });
  }

  /// S = Q·Kᵀ of a tile; where P is kept exact, 16 dims at a time.
  __device__ __forceinline__ void multiply_all(ScoreAccumulator<T, c>& scores, const Queries<c>& q,
                                               const MatrixPointer<c.dim>& k) const {
    if (exact_p) {
#pragma unroll
      for (int step = 0; step < c.dim / 16; ++step) scores.add(q, k, step, true);
    } else {
#pragma unroll
      for (int step = 0; step < c.dim / 16; ++step) scores.add(q, k, step, false);
    }
  }

  /// The mainloop: S of a tile, then softmax beside P·V.
  __device__ void mainloop(TilesAhead& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.keys_at(0));
    load.values(keys, space.values_at(0));
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // Q has arrived
    const Queries<c> q = queries();
    const auto seen_first = static_cast<int>(seen_by_warp<c>(*this).first);
    const auto seen_last = static_cast<int>(seen_by_warp<c>(*this).last);
    Fours<c> fours;
    mask.load(fours, keys);
#pragma unroll 1
    for (int stage = 0; keys.count > 0; stage ^= 1) {
      wait_copies<0>();
      __syncthreads();  // the tile has arrived; all warps are done with the last one
      const KeyTile next = tiles.take();
      if (next.count > 0) {
        load.keys(next, space.keys_at(stage ^ 1));
        load.values(next, space.values_at(stage ^ 1));
      }
      commit_copies();
      const auto first = static_cast<int>(keys.first);
      if (first < seen_last && first + keys.count > seen_first) {
        const auto k = MatrixPointer<c.dim>::by_columns(space.address(space.keys_at(stage)));
        ScoreAccumulator<T, c> scores;
        multiply_all(scores, q, k);
        softmax_and_add(keys, next, fours, scores.sum(),
                        MatrixPointer<c.dim>::by_rows(space.address(space.values_at(stage))));
      } else if (next.count > 0) {
        mask.load(fours, next);
      }
      keys = next;
    }
  }
};

/// The kernel of one row of the tuning table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    general_kernel(const __grid_constant__ AttentionCall call, const ForwardGrid grid, const Splits splits) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(Table::general && c.stages == 2);
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  auto& facts_smem = *reinterpret_cast<ForwardFacts*>(shared + c.shared_bytes(false));
  const auto split = static_cast<int>(blockIdx.y);
  if (threadIdx.x == 0) {
    new (&facts_smem) ForwardFacts(call, grid.rows(call, blockIdx.x), c);
    if (c.split_kv && splits.count > 1) facts_smem.tiles.keep_split(split, splits.count);
    facts_smem.ahead[0] = facts_smem.tiles.next();
  }
  __syncthreads();  // the facts are there
  const QueryRows& rows = facts_smem.rows;
  if (rows.queries.count <= 0) return;
  GeneralCta<T, c> cta(call, facts_smem, grid.exact_p, shared);
  TilesAhead tiles(facts_smem);
  const KeyTile first = tiles.take();
  if (first.count > 0) cta.mainloop(tiles, first);
  if constexpr (c.split_kv) {
    if (splits.count > 1) {
      return store_split<c, true>(call, splits, split, rows, cta.exponents, cta.place, cta.o, cta.softmax);
    }
  }
  finish<T, c, true>(call, rows, cta.exponents, cta.place, cta.o, cta.softmax, cta.space.q_smem);
#endif
}

}  // namespace tilewise::cuda::mma
