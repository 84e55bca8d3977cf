#pragma once

#include "cuda/attention/sm80/forward/cta.cuh"
#include "cuda/attention/sm80/forward/finish.cuh"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/two_warps.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Attention on tensor cores by mma.sync. A CTA keeps a Q tile and walks over K and V tiles; the next tile is
// copied while one is computed. A warp has its own queries. The accumulator of S = Q·Kᵀ has the register
// layout of operand A of P·V, so S and P never leave the registers.

/// The state of a CTA: its queries, O and the sums of its softmax, and two stages of K and V. One stage is
/// computed while the other is filled. One barrier per tile says both that a stage has arrived and that the
/// other is free.
template <typename T, ForwardConfig c>
struct ForwardCta {
  const AttentionCall& call;
  const QueryRows& rows;
  const Loader<T, c> load;
  const Exponents<false> exponents;
  const SeenByAll all;
  const Place<c> place{};
  const CtaTiles<c> space;
  Output<c> o = {};
  SoftmaxRows<c> softmax{};
  TileSums<c> tile_sums;  ///< of the current tile

  __device__ ForwardCta(const AttentionCall& call_, const QueryRows& rows_, std::byte* shared)
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

  /// Applies the band to S and raises the maxima.
  __device__ void start_softmax(const KeyTile& keys, Scores<c>& s) {
    if (all.ends_in(keys, c.keys)) hide<c>(call, rows, keys, place, s);
    raise_maxima<c, false>(s, exponents, softmax, o);
    tile_sums.begin(exponents, softmax);
  }
  __device__ void exponentiate(Probabilities<c>& p, const Scores<c>& s, int step) {
    mma::exponentiate<T, c, false>(p, s, step, exponents, tile_sums.references, tile_sums.sums);
  }
  __device__ void add_values(const Probabilities<c>& p, int step, const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, p);
    multiply_values<T, c>(o, p, v, step);
  }
  /// Softmax and P·V of a tile: P of 16 keys is computed between the products of the 16 before.
  __device__ void softmax_and_add(const KeyTile& keys, Scores<c>& s, const MatrixPointer<c.dim>& v) {
    start_softmax(keys, s);
    Probabilities<c> p[2];
    exponentiate(p[0], s, 0);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      if (step + 1 < c.keys / 16) exponentiate(p[(step + 1) % 2], s, step + 1);
      add_values(p[step % 2], step, v);
    }
    tile_sums.add_to(softmax);
  }

  /// Computes a tile in which nothing is hidden, with the maxima of the tiles before. This takes only
  /// products and exponentials; looking for the maximum first would take one more instruction per score.
  /// Returns false, with nothing added, where an element of P is too large for that.
  __device__ bool add_by_old_maxima(const Queries<c>& q, const MatrixPointer<c.dim>& k,
                                    const MatrixPointer<c.dim>& v) {
    ScoreAccumulator<T, c> scores;
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) scores.add(q, k, step, false);
    tile_sums.begin(exponents, softmax);
    Probabilities<c> p[c.keys / 16];
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) exponentiate(p[step], scores.sum(), step);
    if (__any_sync(~0u, too_large<c>(tile_sums.sums))) return false;
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) add_values(p[step], step, v);
    tile_sums.add_to(softmax);
    return true;
  }

  /// The mainloop: S of a tile, then softmax beside P·V.
  __device__ void mainloop(KeyTiles<false>& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.keys_at(0));
    load.values(keys, space.values_at(0));
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // Q has arrived
    const Queries<c> q = queries();
    const auto seen_first = static_cast<int>(seen_by_warp<c>(*this).first);
    const auto seen_last = static_cast<int>(seen_by_warp<c>(*this).last);
    [[maybe_unused]] bool begun = false;  // some tile has set the maxima
#pragma unroll 1
    for (int stage = 0; keys.count > 0; stage ^= 1) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // the tile has arrived; all warps are done with the last one
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
        ScoreAccumulator<T, c> scores;
#pragma unroll
        for (int step = 0; step < c.dim / 16; ++step) scores.add(q, k, step, false);
        softmax_and_add(keys, scores.sum(), v);
      }
      keys = next;
    }
  }
};

/// The same for head dims so large that a warp cannot keep O of 32 queries. Two warps share the queries: each
/// computes P of half of a tile's keys, gives it to the other warp, and has half of O's dims. So a fragment
/// of K or V serves two products, as with smaller head dims. With 16 queries per warp it would serve one, and
/// shared memory would be the bottleneck.
template <typename T, ForwardConfig c>
struct PairedCta {
  static constexpr ForwardConfig half_of_keys() {
    ForwardConfig half = c;
    half.keys /= 2;
    return half;
  }
  static constexpr ForwardConfig half_tile = half_of_keys();
  static constexpr int own_steps = half_tile.keys / 16;
  static constexpr int own_eights = c.dim / 16;

  const AttentionCall& call;
  const QueryRows& rows;
  const Loader<T, c> load;
  const Exponents<false> exponents;
  const int all_first, all_last;  ///< keys that every query of the CTA sees
  const int side;                 ///< which half of the keys and of the dims this warp has
  const Place<c> place;           ///< with a pair of warps in place of a warp
  const CtaTiles<c> space;
  uint4* p_smem;            ///< of the pair, 2 x [steps, row tiles, 32]: P
  float2* row_values_smem;  ///< of the pair, 2 x [32]: maxima and sums of rows
  float o[c.row_tiles][own_eights][4] = {};
  SoftmaxRows<c> softmax{};

  static __device__ Place<c> place_of_pair() {
    Place<c> place{};
    place.warp /= 2;
    return place;
  }
  __device__ PairedCta(const AttentionCall& call_, const QueryRows& rows_, std::byte* shared)
      : call(call_),
        rows(rows_),
        load(call, rows),
        exponents{ScoreRule(call).scale_log2},
        all_first(static_cast<int>(rows.queries.all(call).first)),
        all_last(static_cast<int>(rows.queries.all(call).last)),
        side(Place<c>{}.warp % 2),
        place(place_of_pair()),
        space(shared),
        p_smem(reinterpret_cast<uint4*>(space.v_smem + c.key_bytes()) +
               place.warp * 2 * own_steps * c.row_tiles * 32),
        row_values_smem(reinterpret_cast<float2*>(space.v_smem + c.key_bytes() + c.pair_p_bytes()) +
                        place.warp * 2 * 32) {}

  __device__ int barrier() const { return 1 + place.warp; }
  __device__ uint4* p_at(int side_, int step, int r) const {
    return p_smem + ((side_ * own_steps + step) * c.row_tiles + r) * 32 + place.lane;
  }

  /// Computes P of this warp's keys with the maxima of the tiles before and stores it for both warps. Returns
  /// whether an element is too large.
  __device__ bool exponentiate(Probabilities<c> (&p)[own_steps], const Scores<half_tile>& s,
                               TileSums<c>& tile) {
    tile.begin(exponents, softmax);
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
      mma::exponentiate<T, half_tile, false>(p[step], s, step, exponents, tile.references, tile.sums);
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
        const std::uint32_t(&four)[4] = p[step][r];
        *p_at(side, step, r) = {four[0], four[1], four[2], four[3]};
      }
    }
    return too_large<c>(tile.sums);
  }
  /// Raises the maxima to those of both warps' keys.
  __device__ void raise(const Scores<half_tile>& s) {
    float highest[c.row_tiles][2];
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = lowest;
#pragma unroll
        for (int n = 0; n < half_tile.keys / 8; ++n)
          most = fmaxf(most, fmaxf(s[r][n][2 * half], s[r][n][2 * half + 1]));
        highest[r][half] = row_maximum(most);
        const int row = 16 * r + 8 * half + place.lane / 4;
        if (place.lane % 4 == 0) row_values_smem[32 * side + row].x = highest[r][half];
      }
    }
    sync_two_warps(barrier());  // the maxima of both warps are in shared memory
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * r + 8 * half + place.lane / 4;
        highest[r][half] = fmaxf(highest[r][half], row_values_smem[32 * (side ^ 1) + row].x);
      }
    }
    raise_to<c, false>(highest, exponents, softmax, o);
  }

  /// Computes a tile whose K has arrived. `values_there` waits for V.
  template <typename There>
  __device__ void tile(const KeyTile& keys, const Queries<half_tile>& q, const std::byte* k_tile,
                       const std::byte* v_tile, const There& values_there) {
    const auto k = MatrixPointer<c.dim>::by_columns(space.address(k_tile + side * half_tile.key_bytes()));
    ScoreAccumulator<T, half_tile> scores;
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) scores.add(q, k, step, false);
    Scores<half_tile>& s = scores.sum();
    const auto first = static_cast<int>(keys.first);
    if (first < all_first || first > all_last - c.keys || keys.count < c.keys) {
      const KeyTile own_keys{keys.first + side * half_tile.keys, keys.count - side * half_tile.keys};
      hide<half_tile>(call, rows, own_keys, {place.warp, place.lane}, s);
    }
    Probabilities<c> p[own_steps];
    TileSums<c> sums;
    if (any_of_two_warps(barrier(), exponentiate(p, s, sums))) {  // P of both warps is in shared memory
      raise(s);
      exponentiate(p, s, sums);
      sync_two_warps(barrier());  // the new P of both warps is in shared memory
    }
    values_there();
    const auto v = MatrixPointer<c.dim>::by_rows(space.address(v_tile + side * c.dim));
    const MatrixPointer<c.dim> v_own{v.at_smem + side * half_tile.key_bytes()};
    const MatrixPointer<c.dim> v_other{v.at_smem + (side ^ 1) * half_tile.key_bytes()};
    Probabilities<c> other[own_steps];
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
        const uint4 four = *p_at(side ^ 1, step, r);
        other[step][r][0] = four.x;
        other[step][r][1] = four.y;
        other[step][r][2] = four.z;
        other[step][r][3] = four.w;
      }
    }
#pragma unroll
    for (int step = 0; step < own_steps; ++step) {
      add_rounded<T, c>(softmax, p[step]);
      multiply_values<T, c>(o, p[step], v_own, step);
    }
#pragma unroll
    for (int step = 0; step < own_steps; ++step) multiply_values<T, c>(o, other[step], v_other, step);
    sums.add_to(softmax);
  }

  /// The mainloop with one stage: V is loaded during Q·Kᵀ, and the next K during P·V.
  __device__ void mainloop(KeyTiles<false>& tiles, KeyTile keys) {
    load.queries(space.q_smem);
    load.keys(keys, space.k_smem);
    commit_copies();
    const Queries<half_tile> q{space.queries_of(place)};
#pragma unroll 1
    while (keys.count > 0) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // K has arrived; all warps are done with the last V
      load.values(keys, space.v_smem);
      commit_copies();
      tile(keys, q, space.k_smem, space.v_smem, [&] {
        wait_copies<0>();
        __syncthreads();  // V has arrived; all warps are done with K
        if (next.count > 0) load.keys(next, space.k_smem);
        commit_copies();
      });
      keys = next;
    }
  }

  __device__ void finish() {
    LaneRow<c, false> lane_row(call, exponents, place, softmax);
    float2* const row_values = row_values_smem + lane_row.row % 32;
    if (lane_row.first) row_values[32 * side] = {lane_row.sum, lane_row.rounded};
    // Both warps' sums are in shared memory, and both are done with Q, whose place O takes.
    sync_two_warps(barrier());
    const float2 other = row_values[32 * (side ^ 1)];
    lane_row.sum += other.x;
    lane_row.rounded += other.y;
    lane_row.complete(call, exponents);
    lane_row.first = lane_row.first && side == 0;
    const float own_inverse = finish_row<c, false>(call, rows, lane_row);
    write_output<T, c, own_eights>(call, rows, place, o, own_inverse, space.q_smem, side * own_eights);
  }
};

/// Writes the partial O of a split of the keys, with its maximum and sums, for combine_splits().
template <ForwardConfig c, bool general>
__device__ __forceinline__ void store_split(const AttentionCall& call, const Splits& splits, int split,
                                            const QueryRows& rows, const Exponents<general>& exponents,
                                            const Place<c>& place, const Output<c>& o,
                                            const SoftmaxRows<c>& softmax) {
  const LaneRow<c, general> lane_row(call, exponents, place, softmax);
  const auto place_of = [&](int row) {
    return Splits::row(call, rows.queries.b, rows.head(row), rows.queries.first + rows.query(row));
  };
  if (lane_row.row < rows.count() && lane_row.first) {
    float* state = splits.state(split, place_of(lane_row.row));
    state[0] = lane_row.maximum;
    state[1] = lane_row.sum * lane_row.factor;
    state[2] = lane_row.rounded * lane_row.factor;
  }
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(r, half);
      const float factor = __shfl_sync(~0u, lane_row.factor, place.lane / 4 * 4 + 2 * r + half);
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

/// Joins the sink, normalises O, and writes O and LSE.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryRows& rows,
                                       const Exponents<general>& exponents, const Place<c>& place,
                                       Output<c>& o, const SoftmaxRows<c>& softmax, std::byte* q_smem) {
  __syncwarp();  // the warp is done with its queries, whose place O takes
  const float own_inverse =
      finish_row<c, general>(call, rows, LaneRow<c, general>(call, exponents, place, softmax));
  write_output<T, c, c.dim / 8>(call, rows, place, o, own_inverse, q_smem, 0);
}

/// The kernel of one row of the tuning table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const ForwardGrid grid, const Splits splits) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(!Table::general);
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  const QueryRows rows = grid.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return;
  KeyTiles<false> tiles(call, rows.queries, c.keys);
  if constexpr (c.split_kv) {
    if (splits.count > 1) tiles.keep_split(static_cast<int>(blockIdx.y), splits.count);
  }
  const KeyTile first = tiles.next();
  if constexpr (c.paired) {
    static_assert(!c.split_kv && c.stages == 1);
    PairedCta<T, c> cta(call, rows, shared);
    if (first.count > 0) cta.mainloop(tiles, first);
    cta.finish();
  } else {
    static_assert(c.stages == 2);
    ForwardCta<T, c> cta(call, rows, shared);
    if (first.count > 0) cta.mainloop(tiles, first);
    if constexpr (c.split_kv) {
      if (splits.count > 1) {
        return store_split<c, false>(call, splits, static_cast<int>(blockIdx.y), rows, cta.exponents,
                                     cta.place, cta.o, cta.softmax);
      }
    }
    finish<T, c, false>(call, rows, cta.exponents, cta.place, cta.o, cta.softmax, cta.space.q_smem);
  }
#endif
}

}  // namespace tilewise::cuda::mma
