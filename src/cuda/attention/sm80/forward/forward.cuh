#pragma once

#include "cuda/attention/sm80/forward/block.cuh"
#include "cuda/attention/sm80/forward/finish.cuh"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/two_warps.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Heads too wide for a warp to keep o of 32 queries: two warps have the queries in common. Each makes the
// weights of half of a tile's keys, hands them to the other, and has half of o's dims. A fragment of keys or
// values then serves two products, as with narrower heads, where with 16 queries a warp it would serve one
// and shared memory would be what everything waits for.

template <typename T, ForwardConfig c>
struct PairedBlock {
  static constexpr ForwardConfig half_of_keys() {
    ForwardConfig half = c;
    half.keys /= 2;
    return half;
  }
  static constexpr ForwardConfig own = half_of_keys();
  static constexpr int own_steps = own.keys / 16;
  static constexpr int own_eights = c.dim / 16;

  const AttentionCall& call;
  const QueryRows& rows;
  const Loader<T, c> load;
  const Exponents<false> exponents;
  const int all_first, all_last;  ///< keys that every query sees
  const int side;                 ///< which keys and dims of the two
  const Place<c> place;           ///< with pairs for warps
  const BlockSpace<c> space;
  uint4* weights_smem;   ///< of the pair, 2 x [steps, row tiles, 32]
  float2* numbers_smem;  ///< of the pair, 2 x [32]
  float o[c.row_tiles][own_eights][4] = {};
  SoftmaxRows<c> softmax{};

  static __device__ Place<c> place_of_pair() {
    Place<c> place{};
    place.warp /= 2;
    return place;
  }
  __device__ PairedBlock(const AttentionCall& call_, const QueryRows& rows_, std::byte* shared)
      : call(call_),
        rows(rows_),
        load(call, rows),
        exponents{ScoreRule(call).scale_log2},
        all_first(static_cast<int>(rows.queries.all(call).first)),
        all_last(static_cast<int>(rows.queries.all(call).last)),
        side(Place<c>{}.warp % 2),
        place(place_of_pair()),
        space(shared),
        weights_smem(reinterpret_cast<uint4*>(space.v_smem + c.key_bytes()) +
                     place.warp * 2 * own_steps * c.row_tiles * 32),
        numbers_smem(reinterpret_cast<float2*>(space.v_smem + c.key_bytes() + c.pair_weights_bytes()) +
                     place.warp * 2 * 32) {}

  __device__ int barrier() const { return 1 + place.warp; }
  __device__ uint4* weights_of(int side_, int step, int r) const {
    return weights_smem + ((side_ * own_steps + step) * c.row_tiles + r) * 32 + place.lane;
  }

  /// Weights of the own keys, relative to the maxima as they are, for both; gives whether one is too large.
  __device__ bool weigh(Weights<c> (&weights)[own_steps], const Scores<own>& s, TileSums<c>& tile) {
    tile.begin(exponents, softmax);
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
      mma::weigh<T, own, false>(weights[step], s, step, exponents, tile.references, tile.sums);
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
        const std::uint32_t(&four)[4] = weights[step][r];
        *weights_of(side, step, r) = {four[0], four[1], four[2], four[3]};
      }
    }
    return too_large<c>(tile.sums);
  }
  /// Raises the maxima to those of both warps' keys.
  __device__ void raise(const Scores<own>& s) {
    float highest[c.row_tiles][2];
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = lowest;
#pragma unroll
        for (int n = 0; n < own.keys / 8; ++n)
          most = fmaxf(most, fmaxf(s[r][n][2 * half], s[r][n][2 * half + 1]));
        highest[r][half] = row_maximum(most);
        const int row = 16 * r + 8 * half + place.lane / 4;
        if (place.lane % 4 == 0) numbers_smem[32 * side + row].x = highest[r][half];
      }
    }
    sync_two_warps(barrier());  // both warps' maxima are there
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * r + 8 * half + place.lane / 4;
        highest[r][half] = fmaxf(highest[r][half], numbers_smem[32 * (side ^ 1) + row].x);
      }
    }
    raise_to<c, false>(highest, exponents, softmax, o);
  }

  /// A tile whose keys are there. Values are, too, after `values_there`.
  template <typename There>
  __device__ void tile(const KeyTile& keys, const Queries<own>& q, const std::byte* k_tile,
                       const std::byte* v_tile, const There& values_there) {
    const auto k = MatrixPointer<c.dim>::by_columns(space.address(k_tile + side * own.key_bytes()));
    Products<T, own> products;
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, false);
    Scores<own>& s = products.sum();
    const auto first = static_cast<int>(keys.first);
    if (first < all_first || first > all_last - c.keys || keys.count < c.keys) {
      const KeyTile own_keys{keys.first + side * own.keys, keys.count - side * own.keys};
      hide<own>(call, rows, own_keys, {place.warp, place.lane}, s);
    }
    Weights<c> weights[own_steps];
    TileSums<c> sums;
    if (any_of_two_warps(barrier(), weigh(weights, s, sums))) {  // both warps' weights are there
      raise(s);
      weigh(weights, s, sums);
      sync_two_warps(barrier());  // the new weights are there
    }
    values_there();
    const auto v = MatrixPointer<c.dim>::by_rows(space.address(v_tile + side * c.dim));
    const MatrixPointer<c.dim> v_own{v.at_smem + side * own.key_bytes()};
    const MatrixPointer<c.dim> v_other{v.at_smem + (side ^ 1) * own.key_bytes()};
    Weights<c> other[own_steps];
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
        const uint4 four = *weights_of(side ^ 1, step, r);
        other[step][r][0] = four.x;
        other[step][r][1] = four.y;
        other[step][r][2] = four.z;
        other[step][r][3] = four.w;
      }
    }
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
      add_rounded<T, c>(softmax, weights[step]);
      multiply_values<T, c>(o, weights[step], v_own, step);
    }
#pragma unroll
    for (int step = 0; step < own_steps; ++step) multiply_values<T, c>(o, other[step], v_other, step);
    sums.add_to(softmax);
  }

  /// Tiles in one stage: values come beside q·k, the next keys beside the rest.
  __device__ void walk_in_place(KeyTiles<false>& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.k_smem);
    commit_copies();
    const Queries<own> q{space.queries_of(place)};
#pragma unroll 1
    while (keys.count > 0) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // keys are there, and everyone is done with the last values
      load.values(keys, space.v_smem);
      commit_copies();
      tile(keys, q, space.k_smem, space.v_smem, [&] {
        wait_copies<0>();
        __syncthreads();  // values are there, and everyone is done with the keys
        if (next.count > 0) load.keys(next, space.k_smem);
        commit_copies();
      });
      keys = next;
    }
  }

  __device__ void finish() {
    OwnRow<c, false> own_row(call, exponents, place, softmax);
    float2* const numbers = numbers_smem + own_row.row % 32;
    if (own_row.first) numbers[32 * side] = {own_row.sum, own_row.rounded};
    sync_two_warps(barrier());  // both warps' sums are there, and both are done with their queries
    const float2 other = numbers[32 * (side ^ 1)];
    own_row.sum += other.x;
    own_row.rounded += other.y;
    own_row.complete(call, exponents);
    own_row.first = own_row.first && side == 0;
    const float own_inverse = finish_row<c, false>(call, rows, own_row);
    write_output<T, c, own_eights>(call, rows, place, o, own_inverse, space.q_smem, side * own_eights);
  }
};

// Attention on tensor cores by mma.sync. A block keeps a tile of queries and walks over tiles of keys, of
// which the next is being copied while one is computed. A warp has its queries for itself: scores come out of
// q·k in the form in which weights go into the product with v, so they never leave the registers.

/// Leaves what a split of the keys came to for combine_splits().
template <ForwardConfig c, bool general>
__device__ __forceinline__ void store_split(const AttentionCall& call, const Splits& splits, int split,
                                            const QueryRows& rows, const Exponents<general>& exponents,
                                            const Place<c>& place, const Output<c>& o,
                                            const SoftmaxRows<c>& softmax) {
  const OwnRow<c, general> own(call, exponents, place, softmax);
  const auto place_of = [&](int row) {
    return Splits::row(call, rows.queries.b, rows.head(row), rows.queries.first + rows.query(row));
  };
  if (own.row < rows.count() && own.first) {
    float* state = splits.state(split, place_of(own.row));
    state[0] = own.maximum;
    state[1] = own.sum * own.factor;
    state[2] = own.rounded * own.factor;
  }
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(r, half);
      const float factor = __shfl_sync(~0u, own.factor, place.lane / 4 * 4 + 2 * r + half);
      if (row >= rows.count()) continue;
      float* to = splits.o(split, place_of(row));
#pragma unroll
      for (int n = 0; n < c.dim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = 8 * n + place.column() + e;
          if (d < splits.dim_v) to[d] = o[r][n][2 * half + e] * factor;
        }
      }
    }
  }
}

/// Joins the sink, divides, writes lse and o.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryRows& rows,
                                       const Exponents<general>& exponents, const Place<c>& place,
                                       Output<c>& o, const SoftmaxRows<c>& softmax, std::byte* q_smem) {
  __syncwarp();  // the warp is done with its queries
  const float own_inverse =
      finish_row<c, general>(call, rows, OwnRow<c, general>(call, exponents, place, softmax));
  write_output<T, c, c.dim / 8>(call, rows, place, o, own_inverse, q_smem, 0);
}

/// What a block has: its queries, the sums of its softmax, and two stages of keys and of values. One computes
/// while the other is filled, and one barrier a tile says both that a stage is there and that one is free.
template <typename T, ForwardConfig c>
struct Block {
  const AttentionCall& call;
  const QueryRows& rows;
  const Loader<T, c> load;
  const Exponents<false> exponents;
  const SeenByAll all;
  const Place<c> place{};
  const BlockSpace<c> space;
  Output<c> o = {};
  SoftmaxRows<c> softmax{};
  TileSums<c> own;  ///< of the tile at hand

  __device__ Block(const AttentionCall& call_, const QueryRows& rows_, std::byte* shared)
      : call(call_),
        rows(rows_),
        load(call, rows),
        exponents{ScoreRule(call).scale_log2},
        all(call, rows),
        space(shared) {}

  __device__ Queries<c> queries() const {
    Queries<c> q{space.queries_of(place)};
    q.load();
    return q;
  }

  /// Hides what is hidden of a tile and raises the maxima.
  __device__ void start_softmax(const KeyTile& keys, Scores<c>& s) {
    if (all.ends_in(keys, c.keys)) hide<c>(call, rows, keys, place, s);
    raise_maxima<c, false>(s, exponents, softmax, o);
    own.begin(exponents, softmax);
  }
  __device__ void weigh(Weights<c>& weights, const Scores<c>& s, int step) {
    mma::weigh<T, c, false>(weights, s, step, exponents, own.references, own.sums);
  }
  __device__ void add_values(const Weights<c>& weights, int step, const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, weights);
    multiply_values<T, c>(o, weights, v, step);
  }
  /// All of a tile after its products: weights of 16 keys are made beside the product of those before.
  __device__ void weigh_and_add(const KeyTile& keys, Scores<c>& s, const MatrixPointer<c.dim>& v) {
    start_softmax(keys, s);
    Weights<c> weights[2];
    weigh(weights[0], s, 0);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      if (step + 1 < c.keys / 16) weigh(weights[(step + 1) % 2], s, step + 1);
      add_values(weights[step % 2], step, v);
    }
    own.add_to(softmax);
  }

  /// A tile in which nothing is hidden, by the maxima as they are: nothing but products and weights, where a
  /// look at all scores first would be one instruction for each. False where a weight is too large for that;
  /// then nothing was added.
  __device__ bool add_by_old_maxima(const Queries<c>& q, const MatrixPointer<c.dim>& k,
                                    const MatrixPointer<c.dim>& v) {
    Products<T, c> products;
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, false);
    own.begin(exponents, softmax);
    Weights<c> weights[c.keys / 16];
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) weigh(weights[step], products.sum(), step);
    if (__any_sync(~0u, too_large<c>(own.sums))) return false;
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) add_values(weights[step], step, v);
    own.add_to(softmax);
    return true;
  }

  /// A tile after another: products, then softmax beside the product with values.
  __device__ void walk(KeyTiles<false>& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.keys_at(0));
    load.values(keys, space.values_at(0));
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // queries are there
    const Queries<c> q = queries();
    const auto seen_first = static_cast<int>(seen_by_warp<c>(*this).first);
    const auto seen_last = static_cast<int>(seen_by_warp<c>(*this).last);
    [[maybe_unused]] bool begun = false;  // there are maxima
#pragma unroll 1
    for (int stage = 0; keys.count > 0; stage ^= 1) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one
      if (next.count > 0) {
        load.keys(next, space.keys_at(stage ^ 1));
        load.values(next, space.values_at(stage ^ 1));
      }
      commit_copies();
      const auto first = static_cast<int>(keys.first);
      if (first < seen_last && first + keys.count > seen_first) {
        const auto k = MatrixPointer<c.dim>::by_columns(space.address(space.keys_at(stage)));
        const auto v = MatrixPointer<c.dim>::by_rows(space.address(space.values_at(stage)));
        if constexpr (c.old_maxima) {
          if (begun && !all.ends_in(keys, c.keys) && add_by_old_maxima(q, k, v)) {
            keys = next;
            continue;
          }
          begun = true;
        }
        Products<T, c> products;
#pragma unroll
        for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, false);
        weigh_and_add(keys, products.sum(), v);
      }
      keys = next;
    }
  }
};

/// The kernel of one row of a table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const QueryBlocks blocks,
                   const Splits splits) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(!Table::general);
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  const QueryRows rows = blocks.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return;
  KeyTiles<false> tiles(call, rows.queries, c.keys);
  if constexpr (c.split_kv) {
    if (splits.count > 1) tiles.keep_split(static_cast<int>(blockIdx.y), splits.count);
  }
  const KeyTile first = tiles.next();
  if constexpr (c.paired) {
    static_assert(!c.split_kv && c.stages == 1);
    PairedBlock<T, c> block(call, rows, shared);
    if (first.count > 0) block.walk_in_place(tiles, first);
    block.finish();
  } else {
    static_assert(c.stages == 2);
    Block<T, c> block(call, rows, shared);
    if (first.count > 0) block.walk(tiles, first);
    if constexpr (c.split_kv) {
      if (splits.count > 1) {
        return store_split<c, false>(call, splits, static_cast<int>(blockIdx.y), rows, block.exponents,
                                     block.place, block.o, block.softmax);
      }
    }
    finish<T, c, false>(call, rows, block.exponents, block.place, block.o, block.softmax, block.space.q_smem);
  }
#endif
}

}  // namespace tilewise::cuda::mma
