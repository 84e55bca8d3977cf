#pragma once

#include "cuda/mma/parts.h"
#include "cuda/mma/products.cuh"
#include "cuda/mma/query_rows.cuh"
#include "cuda/mma/scores.cuh"
#include "cuda/mma/softmax.cuh"
#include "cuda/mma/tuning.h"
#include "cuda/tile/key_tiles.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Attention on tensor cores by mma.sync. A block keeps a tile of queries and walks over tiles of keys, of
// which the next is being copied while one is computed. A warp has its queries for itself: scores come out of
// q·k in the form in which weights go into the product with v, so they never leave the registers.

/// What a row came to. Four lanes share two or four rows; each does the arithmetic of one, since code that
/// runs once is mostly waited for.
template <ForwardConfig c, bool general>
struct OwnRow {
  static constexpr int count = 2 * c.row_tiles;
  static_assert(count <= 4);
  int row;             ///< of the block
  bool first;          ///< of the lanes that have it
  float sum, rounded;  ///< of its weights, as they are and as o has them
  float maximum;       ///< of its scores, in natural units
  float factor = 1;    ///< makes sums, and o, relative to that

  __device__ OwnRow(const AttentionCall& call, const Exponents<general>& exponents, const Place<c>& place,
                    const SoftmaxRows<c>& softmax) {
    const int own = place.lane % count;
    row = place.row(own / 2, own % 2);
    first = place.lane % 4 < count;
#pragma unroll
    for (int index = 0; index < count; ++index) {
      const float row_total = row_sum(softmax.sum[index / 2][index % 2]);
      if (index != own) continue;
      sum = row_total;
      maximum = softmax.maximum[index / 2][index % 2];
      rounded = softmax.rounded[index / 2][index % 2 * 2];
    }
    if constexpr (!general) {
      if (sum > 0) factor = exp2f(fmaf(-maximum, exponents.unit, exponents.reference(maximum)));
      maximum = fmaxf(maximum * static_cast<float>(call.scale), lowest);
    }
  }
};

/// What a row's sum of values is to be multiplied by, and its lse, which is written.
template <ForwardConfig c, bool general>
__device__ __forceinline__ float finish_row(const AttentionCall& call, const QueryRows& rows,
                                            const OwnRow<c, general>& own) {
  float maximum = own.maximum;
  float factor = own.factor;
  float sink_weight = 0;
  if (call.problem.features.sinks && own.row < rows.count()) {
    const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(own.row)));
    const float highest = fmaxf(maximum, sink);
    // The sink may dwarf every weight, so that all of o hangs on this factor: not the approximate one.
    factor *= expf(maximum - highest);
    sink_weight = expf(sink - highest);
    maximum = highest;
  }
  if (call.lse.wanted && own.row < rows.count() && own.first) {
    const float total = own.sum * factor + sink_weight;
    const float lse = total == 0 ? minus_infinity : maximum + logf(total);
    *rows.float_of(call.lse, own.row) = lse;
  }
  const float rounded = own.rounded * factor + sink_weight;
  const float keep_scale = general && call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  return rounded == 0 ? 0.0f : factor * keep_scale / rounded;
}

/// Leaves what a part of the keys came to for join_parts().
template <ForwardConfig c, bool general>
__device__ __forceinline__ void finish_part(const AttentionCall& call, const Parts& parts, int part,
                                            const QueryRows& rows, const Exponents<general>& exponents,
                                            const Place<c>& place, const Output<c>& o,
                                            const SoftmaxRows<c>& softmax) {
  const OwnRow<c, general> own(call, exponents, place, softmax);
  const auto place_of = [&](int row) {
    return Parts::row(call, rows.queries.b, rows.head(row), rows.queries.first + rows.query(row));
  };
  if (own.row < rows.count() && own.first) {
    float* state = parts.state(part, place_of(own.row));
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
      float* to = parts.o(part, place_of(row));
#pragma unroll
      for (int n = 0; n < c.dim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = 8 * n + place.column() + e;
          if (d < parts.dim_v) to[d] = o[r][n][2 * half + e] * factor;
        }
      }
    }
  }
}

/// Joins the sink, divides, writes lse and o; o by way of the warp's queries' place in shared memory, so that
/// rows are written 16 bytes at a time.
template <typename T, ForwardConfig c, bool general>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryRows& rows,
                                       const Exponents<general>& exponents, const Place<c>& place,
                                       Output<c>& o, const SoftmaxRows<c>& softmax, std::byte* q_smem) {
  using Tile = SwizzledTile<c.dim>;
  __syncwarp();  // the warp is done with its queries
  const float own_inverse =
      finish_row<c, general>(call, rows, OwnRow<c, general>(call, exponents, place, softmax));
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(r, half);
      const float inverse = __shfl_sync(~0u, own_inverse, place.lane / 4 * 4 + 2 * r + half);
#pragma unroll
      for (int n = 0; n < c.dim / 8; ++n) {
        *reinterpret_cast<std::uint32_t*>(q_smem + Tile::offset(row, n) + 2 * place.column()) =
            pack<T>(o[r][n][2 * half] * inverse, o[r][n][2 * half + 1] * inverse);
      }
    }
  }
  __syncwarp();  // the warp's rows are there
  const auto dims = static_cast<int>(call.problem.dim_v);
  const bool aligned = aligned_chunks(call.o);
  std::byte* first = rows.row_of(call.o, 0);
#pragma unroll 4
  for (int index = place.lane; index < c.warp_rows() * Tile::chunks; index += 32) {
    const int row = place.first_row() + index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (row >= rows.count() || chunk * 8 >= dims) continue;
    std::byte* to = rows.heads == 1 ? first + row * call.o.stride_s * 2 : rows.row_of(call.o, row);
    store_eight(to, chunk * 8, dims, aligned,
                *reinterpret_cast<const uint4*>(q_smem + Tile::offset(row, chunk)));
  }
}

/// What a block has: its queries, the sums of its softmax, and two stages of keys and of values. One computes
/// while the other is filled, and one barrier a tile says both that a stage is there and that one is free.
template <typename T, ForwardConfig c, bool general>
struct Block {
  const AttentionCall& call;
  const QueryRows& rows;
  const Loader<T, c, general> load;
  const ScoreRules rules;
  const Exponents<general> exponents;
  const int all_first, all_last;  ///< keys that every query sees
  const bool few;                 ///< results, so that weights are to be whole
  const Place<c> place{};
  std::byte* q_smem;  ///< [rows, dim]
  std::byte* k_smem;  ///< 2 x [keys, dim]
  std::byte* v_smem;  ///< 2 x [keys, dim]
  float4* own_smem;   ///< of the lane, where the kernel is general
  Output<c> o = {};
  SoftmaxRows<c> softmax{};
  float references[c.row_tiles][2], sums[c.row_tiles][2];  ///< of the tile at hand

  __device__ Block(const AttentionCall& call_, const QueryRows& rows_, std::byte* shared)
      : call(call_),
        rows(rows_),
        load(call, rows),
        rules(general ? ScoreRules(call, rows.queries.b, rows.queries.h) : ScoreRules(call)),
        exponents{general ? log2e : rules.scale_log2},
        all_first(static_cast<int>(rows.queries.all(call).first)),
        all_last(static_cast<int>(rows.queries.all(call).last)),
        few(few_results(call)),
        q_smem(shared),
        k_smem(q_smem + c.query_bytes()),
        v_smem(k_smem + c.stages * c.key_bytes()),
        own_smem(reinterpret_cast<float4*>(v_smem + c.stages * c.key_bytes()) + place.warp * 8 * c.scores() +
                 place.lane) {}

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* keys_at(int stage) const { return k_smem + stage * c.key_bytes(); }
  __device__ std::byte* values_at(int stage) const { return v_smem + stage * c.key_bytes(); }
  __device__ Queries<c> queries() const {
    Queries<c> q{MatrixPointer<c.dim>::by_rows(address(q_smem + place.first_row() * c.row_bytes()))};
    q.load();
    return q;
  }

  /// Keys that some query of the warp sees; a warp past the last query sees none.
  __device__ KeyRange seen_by_warp() const {
    const QueryTile& queries = rows.queries;
    const int last = min(place.first_row() + c.warp_rows(), rows.count()) - 1;
    if (place.first_row() > last) return {};
    return {call.keys_of(queries.sequence, queries.first + rows.query(place.first_row())).first,
            call.keys_of(queries.sequence, queries.first + rows.query(last)).last};
  }

  /// Scores of a tile from its products, the maxima raised; gives what dropout keeps.
  __device__ std::uint64_t start_softmax(const KeyTile& keys, Scores<c>& s) {
    const auto first = static_cast<int>(keys.first);
    const bool edge = first < all_first || first > all_last - c.keys || keys.count < c.keys || keys.tile >= 0;
    std::uint64_t kept = 0;
    if constexpr (general) {
      kept = finish_scores<c>(call, rules, rows, keys, edge, place, own_smem, s);
    } else if (edge) {
      hide<c>(call, rows, keys, place, s);
    }
    raise_maxima<c, general>(s, exponents, softmax, o);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        references[r][half] = exponents.reference(softmax.maximum[r][half]);
        sums[r][half] = 0;
      }
    }
    return kept;
  }
  __device__ void weigh(Weights<c>& weights, const Scores<c>& s, int step) {
    mma::weigh<T, c, general>(weights, s, step, exponents, references, sums);
  }
  __device__ void add_values(Weights<c>& weights, int step, std::uint64_t kept,
                             const MatrixPointer<c.dim>& v) {
    add_rounded<T, c>(softmax, weights);
    if constexpr (general) {
      if (call.problem.features.dropout) drop<c>(weights, step, kept);
    }
    multiply_values<T, c>(o, weights, v, step);
  }
  /// The same with what the weights lost in rounding.
  __device__ void add_rest(const Weights<c>& weights, const Scores<c>& s, int step, std::uint64_t kept,
                           const MatrixPointer<c.dim>& v) {
    Weights<c> rest;
    weigh_rest<T, c, general>(rest, weights, s, step, exponents, references);
    add_values(rest, step, kept, v);
  }
  __device__ void end_softmax() {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[r][half] += sums[r][half];
    }
  }

  /// All of a tile after its products: weights of 16 keys are made beside the product of those before.
  __device__ void weigh_and_add(const KeyTile& keys, Scores<c>& s, const MatrixPointer<c.dim>& v) {
    const std::uint64_t kept = start_softmax(keys, s);
    Weights<c> weights[2];
    weigh(weights[0], s, 0);
#pragma unroll
    for (int step = 0; step < c.keys / 16; ++step) {
      if (step + 1 < c.keys / 16) weigh(weights[(step + 1) % 2], s, step + 1);
      if constexpr (general) {
        if (few) add_rest(weights[step % 2], s, step, kept, v);
      }
      add_values(weights[step % 2], step, kept, v);
    }
    end_softmax();
  }

  /// A tile after another: products, then softmax beside the product with values.
  __device__ void walk(KeyTiles<general>& tiles, KeyTile keys) {
    load.queries(q_smem);
    load.keys(keys, keys_at(0));
    load.values(keys, values_at(0));
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // queries are there
    const Queries<c> q = queries();
    const auto seen_first = static_cast<int>(seen_by_warp().first);
    const auto seen_last = static_cast<int>(seen_by_warp().last);
#pragma unroll 1
    for (int stage = 0; keys.count > 0; stage ^= 1) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one
      if (next.count > 0) {
        load.keys(next, keys_at(stage ^ 1));
        load.values(next, values_at(stage ^ 1));
      }
      commit_copies();
      const auto first = static_cast<int>(keys.first);
      if (first < seen_last && first + keys.count > seen_first) {
        const auto k = MatrixPointer<c.dim>::by_columns(address(keys_at(stage)));
        Products<T, c> products;
#pragma unroll
        for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, general && few);
        weigh_and_add(keys, products.sum(), MatrixPointer<c.dim>::by_rows(address(values_at(stage))));
      }
      keys = next;
    }
  }

  /// The same in one stage: another block of the multiprocessor computes while this one waits.
  __device__ void walk_in_place(KeyTiles<general>& tiles, KeyTile keys) {
    load.queries(q_smem);
    load.keys(keys, k_smem);
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // queries are there
    const Queries<c> q = queries();
    const auto k = MatrixPointer<c.dim>::by_columns(address(k_smem));
    const auto v = MatrixPointer<c.dim>::by_rows(address(v_smem));
#pragma unroll 1
    while (keys.count > 0) {
      const KeyTile next = tiles.next();
      wait_copies<0>();
      __syncthreads();  // keys are there, and everyone is done with the last values
      load.values(keys, v_smem);
      commit_copies();
      Products<T, c> products;
#pragma unroll
      for (int step = 0; step < c.dim / 16; ++step) products.add(q, k, step, general && few);
      wait_copies<0>();
      __syncthreads();  // values are there, and everyone is done with the keys
      if (next.count > 0) load.keys(next, k_smem);
      commit_copies();
      weigh_and_add(keys, products.sum(), v);
      keys = next;
    }
  }

  /// The same with products a tile ahead, so that softmax runs beside those.
  __device__ void walk_ahead(KeyTiles<general>& tiles, KeyTile keys) {
    load.queries(q_smem);
    load.keys(keys, keys_at(0));
    commit_copies();
    KeyTile next = tiles.next();
    if (next.count > 0) load.keys(next, keys_at(1));
    load.values(keys, values_at(0));
    commit_copies();
    wait_copies<1>();
    __syncthreads();  // queries and the first keys are there
    const Queries<c> q = queries();
    const auto first = MatrixPointer<c.dim>::by_columns(address(keys_at(0)));
    Products<T, c> products;
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) products.add(q, first, step, general && few);
    Scores<c>& s = products.sum();
    int stage = 0;
#pragma unroll 1
    for (; next.count > 0; stage ^= 1) {
      const KeyTile after = tiles.next();
      wait_copies<0>();
      __syncthreads();  // these values and the next keys are there, and everyone is done with those before
      if (after.count > 0) load.keys(after, keys_at(stage));
      load.values(next, values_at(stage ^ 1));
      commit_copies();
      const auto k = MatrixPointer<c.dim>::by_columns(address(keys_at(stage ^ 1)));
      const auto v = MatrixPointer<c.dim>::by_rows(address(values_at(stage)));
      const std::uint64_t kept = start_softmax(keys, s);
      Products<T, c> products_next;
      Weights<c> weights[c.keys / 16];
      constexpr int dims = c.dim / 16;
      constexpr int steps = c.keys / 16;
#pragma unroll
      for (int step = 0; step < dims; ++step) {
        products_next.add(q, k, step, general && few);
#pragma unroll
        for (int n = 0; n < steps; ++n) {
          if (n * dims / steps == step) weigh(weights[n], s, n);
        }
      }
#pragma unroll
      for (int step = 0; step < steps; ++step) add_values(weights[step], step, kept, v);
      end_softmax();
      const Scores<c>& s_next = products_next.sum();
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
        for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[r][n][e] = s_next[r][n][e];
        }
      }
      keys = next;
      next = after;
    }
    wait_copies<0>();
    __syncthreads();  // the last values are there
    weigh_and_add(keys, s, MatrixPointer<c.dim>::by_rows(address(values_at(stage))));
  }
};

/// The kernel of one row of a table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const QueryBlocks blocks, const Parts parts) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  constexpr bool general = Table::general;
  extern __shared__ __align__(128) std::byte shared[];
  const QueryRows rows = blocks.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return;
  Block<T, c, general> block(call, rows, shared);
  KeyTiles<general> tiles(call, rows.queries, c.keys);
  if constexpr (c.in_parts) {
    if (parts.count > 1) tiles.keep_part(static_cast<int>(blockIdx.y), parts.count);
  }
  const KeyTile first = tiles.next();
  if (first.count > 0) {
    static_assert(c.stages == 1 || c.stages == 2);
    if constexpr (c.stages == 1) {
      block.walk_in_place(tiles, first);
    } else if constexpr (c.products_ahead) {
      block.walk_ahead(tiles, first);
    } else {
      block.walk(tiles, first);
    }
  }
  if constexpr (c.in_parts) {
    if (parts.count > 1) {
      return finish_part<c, general>(call, parts, static_cast<int>(blockIdx.y), rows, block.exponents,
                                     block.place, block.o, block.softmax);
    }
  }
  finish<T, c, general>(call, rows, block.exponents, block.place, block.o, block.softmax, block.q_smem);
#endif
}

}  // namespace tilewise::cuda::mma
