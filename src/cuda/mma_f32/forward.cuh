#pragma once

#include "cuda/mma/query_rows.cuh"
#include "cuda/mma/scores.cuh"
#include "cuda/mma_f32/products.cuh"
#include "cuda/mma_f32/split_rows.cuh"
#include "cuda/mma_f32/tuning.h"

namespace tilewise::cuda::mma_f32 {

// Attention for f32 on tensor cores. A block keeps a tile of queries and walks over tiles of keys, which were
// split before; a warp has its queries for itself.

using mma::hide;
using mma::lowest;
using mma::Place;
using mma::QueryBlocks;
using mma::QueryRows;
using mma::row_maximum;
using mma::row_sum;
using mma::Scores;

/// Weights are multiplied by this before they are split, so that what f16 loses of low ones is 2^-37 of 1 at
/// most. In an exponent of 2 it would cost digits. The maximum that weights are relative to may be 2^3 too
/// low; they reach 2^15 then.
inline constexpr float weight_scale = 0x1p12f;
inline constexpr float slack = 3;

/// Fragments of a warp's queries: in registers for good, or from shared memory each time.
template <auto c, bool stay = c.queries_stay>
struct Queries {
  MatrixPointer<c.dim> at;

  __device__ void load() {}
  __device__ void get(Parts<c> (&a)[c.row_tiles], int step) const {
    load_rows<c, c.query_part_bytes()>(a, at, step);
  }
};
template <auto c>
struct Queries<c, true> {
  MatrixPointer<c.dim> at;
  Parts<c> kept[c.dim / 16][c.row_tiles];

  __device__ void load() {
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) load_rows<c, c.query_part_bytes()>(kept[step], at, step);
  }
  __device__ void get(Parts<c> (&a)[c.row_tiles], int step) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int part = 0; part < c.parts; ++part) {
#pragma unroll
        for (int n = 0; n < 4; ++n) a[r][part][n] = kept[step][r][part][n];
      }
    }
  }
};

/// What a block has: its queries, the sums of its softmax, and a ring of buffers, through which keys and
/// values of a tile pass by turns.
template <auto c>
struct Block {
  const AttentionCall& call;
  const QueryRows& rows;
  const SplitRows &k, &v;
  const Place<c> place{};
  std::byte* q_smem;        ///< parts x [rows, dim]
  std::byte* ring_smem;     ///< buffers x parts x [keys, dim]
  int* exponents_smem;      ///< [rows]
  const float unit;         ///< from products to exponents of 2
  std::int64_t first_tile;  ///< of the sequence, among all
  int tile, end;            ///< the tile at hand, and where they end
  ScaledSum<c> o;
  float maximum[c.row_tiles][2];  ///< what weights are relative to, in log2 e
  float sum[c.row_tiles][2];      ///< of the lane's own weights
  int row_exponents[c.row_tiles][2];

  __device__ Block(const AttentionCall& call_, const QueryRows& rows_, const SplitRows& k_,
                   const SplitRows& v_, std::byte* shared)
      : call(call_),
        rows(rows_),
        k(k_),
        v(v_),
        q_smem(shared),
        ring_smem(q_smem + c.parts * c.query_part_bytes()),
        exponents_smem(reinterpret_cast<int*>(ring_smem + c.buffers * c.key_bytes())),
        unit(static_cast<float>(call.scale * 1.4426950408889634)),
        first_tile(k.first(call, rows.queries.b, rows.head_kv)) {
    const KeyRange range = rows.queries.any(call);
    tile = static_cast<int>(range.first / c.keys);
    end = range.empty() ? tile : static_cast<int>((range.last + c.keys - 1) / c.keys);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[r][half] = lowest;
        sum[r][half] = 0;
      }
    }
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ const std::byte* buffer(int item) const { return ring_smem + item % c.buffers * c.key_bytes(); }

  /// Begins the copy of an item, which is the keys or the values of a tile, if there are so many.
  __device__ void fetch(int first, int item) const {
    if (first + item / 2 < end) {
      const std::int64_t from_tile = first_tile + first + item / 2;
      const std::byte* from = (item % 2 == 0 ? k : v).data + from_tile * c.key_bytes();
      std::byte* to = ring_smem + item % c.buffers * c.key_bytes();
#pragma unroll
      for (int n = 0; n < c.key_bytes() / 16; n += c.threads()) {
        const int chunk = n + static_cast<int>(threadIdx.x);
        copy_async_16(to + chunk * 16, from + chunk * 16, true);
      }
    }
    commit_copies();
  }

  /// Splits the warp's queries; gives whether they fit.
  __device__ bool load_queries() {
    using Tile = SwizzledTile<c.dim>;
    constexpr int lanes = std::min(32, Tile::chunks);  // of a row
    constexpr int at_once = 32 / lanes;
    const auto dims = static_cast<int>(call.problem.dim_qk);
    const bool aligned = aligned_fours(call.q);
    const int chunk = place.lane % lanes;
    Losses losses;
    constexpr int batch = 8;  // loads under way
    static_assert(c.warp_rows() % (batch * at_once) == 0 || c.warp_rows() < batch * at_once);
    constexpr int rounds = std::min(batch, c.warp_rows() / at_once);
#pragma unroll 1
    for (int first = 0; first < c.warp_rows(); first += rounds * at_once) {
      const int first_row = place.first_row() + first + place.lane / lanes;
      float x[rounds][8];
#pragma unroll
      for (int n = 0; n < rounds; ++n) {
        const int row = first_row + n * at_once;
        const bool present = row < rows.count();
        const auto* from = rows.float_of(call.q, present ? row : 0);
        load_eight(x[n], from, chunk * 8, present ? dims : 0, aligned);
      }
#pragma unroll
      for (int n = 0; n < rounds; ++n) {
        const int row = first_row + n * at_once;
        float largest = 0;
#pragma unroll
        for (int m = 0; m < 8; ++m) largest = fmaxf(largest, fabsf(x[n][m]));
#pragma unroll
        for (int apart = lanes / 2; apart > 0; apart /= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
        }
        const int exponent = exponent_for(largest);
        uint4 chunks[c.parts];
        split_eight<c.parts>(chunks, x[n], power_of_two(exponent), losses);
#pragma unroll
        for (int part = 0; part < c.parts; ++part) {
          *reinterpret_cast<uint4*>(q_smem + part * c.query_part_bytes() + Tile::offset(row, chunk)) =
              chunks[part];
        }
        if (chunk == 0) exponents_smem[row] = exponent;
      }
    }
#pragma unroll
    for (unsigned& count : losses.counts) count = __reduce_add_sync(~0u, count);
    __syncwarp();  // the warp's rows are there
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_exponents[r][half] = exponents_smem[place.row(r, half)];
    }
    return !losses.harmful();
  }

  /// Keys that some query of the warp sees; a warp past the last query sees none.
  __device__ KeyRange seen_by_warp() const {
    const QueryTile& queries = rows.queries;
    const int last = min(place.first_row() + c.warp_rows(), rows.count()) - 1;
    if (place.first_row() > last) return {};
    return {call.keys_of(queries.sequence, queries.first + rows.query(place.first_row())).first,
            call.keys_of(queries.sequence, queries.first + rows.query(last)).last};
  }

  /// Raises the maxima where they are more than `slack` too low. `units` are what turns the tile's products
  /// into exponents of 2.
  __device__ void raise_maxima(const Scores<c>& s, const float (&units)[c.row_tiles][2]) {
    float highest[c.row_tiles][2];  // of the lane's own keys
    bool rises = false;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = fmaxf(s[r][0][2 * half], s[r][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < c.keys / 8; ++n) {
          most = fmaxf(most, fmaxf(s[r][n][2 * half], s[r][n][2 * half + 1]));
        }
        highest[r][half] = most * units[r][half];
        rises |= highest[r][half] > maximum[r][half] + slack;
      }
    }
    if (!__any_sync(~0u, rises)) return;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = maximum[r][half];
        maximum[r][half] = fmaxf(before, row_maximum(highest[r][half]));
        const float rescale = exp2_approx(before - maximum[r][half]);
        sum[r][half] *= rescale;
#pragma unroll
        for (int n = 0; n < c.dim / 8; ++n) {
          o.sum[r][n][2 * half] *= rescale;
          o.sum[r][n][2 * half + 1] *= rescale;
        }
      }
    }
  }

  /// The weights of a tile, times `scale`, split.
  __device__ void weigh(Weights<c>& weights, const Scores<c>& s, const float (&units)[c.row_tiles][2],
                        float scale) {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
      float sums[2] = {};
#pragma unroll
      for (int step = 0; step < c.keys / 16; ++step) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // eight keys n / 2 of the step, row half n % 2
          const int half = n % 2;
          const float(&four)[4] = s[r][2 * step + n / 2];
          const float low = exp2_approx(fmaf(four[2 * half], units[r][half], -maximum[r][half]));
          const float high = exp2_approx(fmaf(four[2 * half + 1], units[r][half], -maximum[r][half]));
          sums[half] += low + high;
          const Pair two = split_two(low * scale, high * scale);
          weights[step][r][0][n] = two.high;
          if constexpr (c.parts == 2) weights[step][r][1][n] = two.low;
        }
      }
      sum[r][0] += sums[0];
      sum[r][1] += sums[1];
    }
  }

  /// All tiles, one after another. Gives whether the queries fit.
  __device__ bool walk() {
    const int first = tile;
#pragma unroll
    for (int item = 0; item < c.buffers - 1; ++item) fetch(first, item);
    const bool fit = load_queries();
    Queries<c> q{MatrixPointer<c.dim>::by_rows(address(q_smem + place.first_row() * c.row_bytes()))};
    q.load();
    const QueryTile& queries = rows.queries;
    const KeyRange all = queries.all(call);
    const auto seen_first = static_cast<int>(seen_by_warp().first);
    const auto seen_last = static_cast<int>(seen_by_warp().last);
#pragma unroll 1
    for (int item = 0; tile < end; ++tile, item += 2) {
      const int k_exponent = k.exponents[first_tile + tile];
      const int v_exponent = v.exponents[first_tile + tile];
      wait_copies<c.buffers - 2>();
      __syncthreads();  // the keys are there, and everyone is done with the values before
      fetch(first, item + c.buffers - 1);
      const int first_key = tile * c.keys;
      const bool seen = first_key < seen_last && first_key + c.keys > seen_first;
      Scores<c> s;
      if (seen) {
        multiply_tile<c, c.key_part_bytes()>(
            s, [&](Parts<c>(&a)[c.row_tiles], int step) { q.get(a, step); }, address(buffer(item)));
      }
      wait_copies<c.buffers - 2>();
      __syncthreads();  // the values are there, and everyone is done with the keys
      fetch(first, item + c.buffers);
      if (!seen) continue;
      const std::int64_t left = queries.sequence.length_k - first_key;
      const KeyTile keys{first_key, static_cast<int>(min(static_cast<std::int64_t>(c.keys), left))};
      if (first_key < all.first || first_key + c.keys > all.last) hide<c>(call, rows, keys, place, s);
      float units[c.row_tiles][2];
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          units[r][half] = scaled_up_to(unit, -k_exponent - row_exponents[r][half]);
        }
      }
      raise_maxima(s, units);
      const float factor = o.follow(v_exponent);
      Weights<c> weights;
      weigh(weights, s, units, c.parts == 1 ? weight_scale * factor : weight_scale);
      add_tile<c, c.key_part_bytes()>(o.sum, weights, address(buffer(item + 1)), factor);
    }
    return fit;
  }

  /// Joins the sink, divides, writes lse and o.
  __device__ void finish() {
    constexpr float ln2 = 0.693147180559945f;
    constexpr float ln2_rest = 0.693147180559945309417 - static_cast<double>(0.693147180559945f);
    const auto dims = static_cast<int>(call.problem.dim_v);
    const bool pairs = aligned_fours(call.o);
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row(r, half);
        const float own_sum = row_sum(sum[r][half]);
        if (row >= rows.count()) continue;
        const float top = maximum[r][half];
        float lse = own_sum == 0 ? minus_infinity : fmaf(top, ln2, fmaf(top, ln2_rest, logf(own_sum)));
        float inverse = own_sum == 0 ? 0.0f : 1 / (own_sum * weight_scale);
        if (call.problem.features.sinks) {
          const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(row)));
          const float highest = fmaxf(lse, sink);
          if (highest > minus_infinity) {
            // The sink may dwarf every weight, so that all of o hangs on this factor: not the approximate
            // one.
            const float own = expf(lse - highest);
            const float total = own + expf(sink - highest);
            inverse *= own / total;
            lse = highest + logf(total);
          }
        }
        if (call.lse.wanted && place.column() == 0) {
          *rows.float_of(call.lse, row) = lse;
        }
        auto* to = rows.float_of(call.o, row);
#pragma unroll
        for (int n = 0; n < c.dim / 8; ++n) {
          const int dim = 8 * n + place.column();
          if (dim >= dims) continue;
          const float first = o.scaled_back(o.sum[r][n][2 * half] * inverse);
          const float second = o.scaled_back(o.sum[r][n][2 * half + 1] * inverse);
          if (pairs && dim + 2 <= dims) {
            *reinterpret_cast<float2*>(to + dim) = {first, second};
          } else {
            to[dim] = first;
            if (dim + 1 < dims) to[dim + 1] = second;
          }
        }
      }
    }
  }
};

/// The kernel of one row of a table.
template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const QueryBlocks blocks, const SplitRows k,
                   const SplitRows v, const Unfit unfit) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(c.keys == Table::keys && c.parts == Table::parts);
  extern __shared__ __align__(128) std::byte shared[];
  const QueryRows rows = blocks.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return;
  if (unfit.keys[rows.queries.b * call.problem.heads_kv + rows.head_kv] != 0) return;
  Block<c> block(call, rows, k, v, shared);
  if (!block.walk()) {
    for (int n = block.place.lane; n < rows.heads; n += 32) {
      unfit.queries[rows.queries.b * call.problem.heads_q + rows.queries.h + n] = 1;
      *unfit.any = 1;
    }
  }
  block.finish();
#endif
}

}  // namespace tilewise::cuda::mma_f32
