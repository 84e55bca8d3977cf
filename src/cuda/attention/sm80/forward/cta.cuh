#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/common/forward/scores.cuh"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/sm80/forward/softmax.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// What the CTAs of the plain kernel, of paired warps and of the general kernel share: how Q, K and V come
// into shared memory and from there into fragments, and the products S = Q·Kᵀ and O += P·V.

/// Fills a tile of `count` rows with the first `dims` elements of `valid` aligned rows, from row `first` on,
/// and the rest with 0. This is for the mainloop, where registers are scarce and instructions take time from
/// the products. So rows must be less than 2^31 bytes apart, which makes an address one multiply-add, and
/// what a thread could keep is recomputed from its number.
template <int count, int dim, int threads>
__device__ __forceinline__ void load_key_rows(std::byte* tile_smem, const std::byte* rows, int stride,
                                              int first, int valid, int dims) {
  using Tile = SwizzledTile<dim>;
  constexpr int lanes = std::bit_ceil(static_cast<unsigned>(Tile::chunks));  // per row; some may be idle
  constexpr int step = threads / lanes;  // rows from one of a thread to its next
  static_assert(threads % lanes == 0 && count % step == 0 && (step % 8 == 0 || Tile::period == 8));
  const int thread = opaque(static_cast<int>(threadIdx.x));
  const int row = thread / lanes;
  const int chunk = thread % lanes;
  if (lanes > Tile::chunks && chunk >= Tile::chunks) return;
  const std::byte* from = rows + std::int64_t{stride} * (first + row) + chunk * 16;
  const int place = Tile::offset(row, chunk);
  const auto to = [&](int r) {  // rows that are no multiple of eight apart differ in their swizzle
    return tile_smem + (place ^ (step < 8 ? r % 8 * 16 : 0)) + r * Tile::row_bytes;
  };
  if (valid >= count && dims == dim) {
#pragma unroll
    for (int r = 0; r < count; r += step) copy_async_16(to(r), from + std::int64_t{stride} * r, true);
  } else {
    const int bytes = max(0, min(16, (dims - chunk * 8) * 2));
#pragma unroll 1
    for (int r = 0; r < count; r += step) {
      const bool present = row + r < valid && bytes > 0;
      copy_async_part(to(r), present ? from + std::int64_t{stride} * r : rows, present ? bytes : 0);
    }
  }
}

/// Loads tiles into shared memory.
template <typename T, ForwardConfig c>
struct Loader {
  const AttentionCall& call;
  const QueryRows& rows;
  int dim_qk, dim_v;
  const std::byte *keys_gmem, *values_gmem;  ///< of the head, from the sequence's first key on

  __device__ Loader(const AttentionCall& call_, const QueryRows& rows_)
      : call(call_),
        rows(rows_),
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        dim_v(static_cast<int>(call.problem.dim_v)),
        keys_gmem(row_of_halves(call.k, rows.queries.b, rows.head_kv, rows.queries.sequence.first_k)),
        values_gmem(row_of_halves(call.v, rows.queries.b, rows.head_kv, rows.queries.sequence.first_k)) {}

  __device__ void queries(std::byte* to_smem) const {
    if (rows.heads == 1) {
      return load_strided_rows<c.rows(), c.dim, c.threads()>(to_smem, rows.row_of(call.q, 0),
                                                             call.q.stride_s * 2, rows.count(), dim_qk);
    }
    load_any_rows<c.rows(), c.dim, c.threads()>(
        to_smem, [&](int r) { return rows.row_of(call.q, r); }, aligned_chunks(call.q), rows.count(), dim_qk);
  }
  __device__ void keys(const KeyTile& tile, std::byte* to_smem) const {
    load(call.k, keys_gmem, tile, dim_qk, to_smem);
  }
  __device__ void values(const KeyTile& tile, std::byte* to_smem) const {
    load(call.v, values_gmem, tile, dim_v, to_smem);
  }

 private:
  __device__ void load(const Rows& from, const std::byte* first, const KeyTile& tile, int dims,
                       std::byte* to_smem) const {
    load_key_rows<c.keys, c.dim, c.threads()>(to_smem, first, static_cast<int>(from.stride_s * 2),
                                              static_cast<int>(tile.first), tile.count, dims);
  }
};

/// Fragments of a warp's queries: kept in registers, or loaded from shared memory for each K tile.
template <ForwardConfig c, bool stay = c.queries_stay>
struct Queries {
  MatrixPointer<c.dim> at;

  __device__ void load() {}
  __device__ void get(std::uint32_t (&a)[c.row_tiles][4], int step) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) load_matrices(a[r], at.at(16 * r, step));
  }
};
template <ForwardConfig c>
struct Queries<c, true> {
  MatrixPointer<c.dim> at;
  std::uint32_t kept[c.dim / 16][c.row_tiles][4];

  __device__ void load() {
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) {
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) load_matrices(kept[step][r], at.at(16 * r, step));
    }
  }
  __device__ void get(std::uint32_t (&a)[c.row_tiles][4], int step) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < 4; ++n) a[r][n] = kept[step][r][n];
    }
  }
};

/// S += Q·Kᵀ over 16 of the head dims, for all keys of a tile.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void multiply_keys(Scores<c>& s, const Queries<c>& q,
                                              const MatrixPointer<c.dim>& k, int step) {
  std::uint32_t a[c.row_tiles][4];
  q.get(a, step);
  std::uint32_t b[2][4];  // one is loaded while the other is multiplied
  load_matrices(b[0], k.at(0, step));
#pragma unroll
  for (int n = 0; n < c.keys / 16; ++n) {
    const std::uint32_t(&now)[4] = b[n % 2];
    if (n + 1 < c.keys / 16) load_matrices(b[(n + 1) % 2], k.at(16 * (n + 1), step));
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
      multiply_matrices<T>(s[r][2 * n], a[r], now[0], now[1]);
      multiply_matrices<T>(s[r][2 * n + 1], a[r], now[2], now[3]);
    }
  }
}

template <ForwardConfig c>
__device__ __forceinline__ void add_scores(Scores<c>& s, const Scores<c>& more) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[r][n][e] += more[r][n][e];
    }
  }
}

/// S = Q·Kᵀ over all head dims. More than 128 of them are summed in two halves, because the error of a
/// running sum, which tensor cores truncate, grows with its length. With `apart`, every 16 dims are summed by
/// themselves.
template <typename T, ForwardConfig c>
struct ScoreAccumulator {
  static constexpr int steps = c.dim / 16;
  static constexpr int piece = c.dim > 128 ? steps / 2 : steps;
  Scores<c> s = {};
  Scores<c> upper = {};

  __device__ void add(const Queries<c>& q, const MatrixPointer<c.dim>& k, int step, bool apart) {
    if (apart) {
      Scores<c> sixteen = {};
      multiply_keys<T, c>(sixteen, q, k, step);
      add_scores<c>(s, sixteen);
    } else {
      multiply_keys<T, c>(step < piece ? s : upper, q, k, step);
    }
  }
  __device__ Scores<c>& sum() {
    if constexpr (piece < steps) add_scores<c>(s, upper);
    return s;
  }
};

/// O += P·V over 16 keys, for as many dims as `o` has.
template <typename T, ForwardConfig c, int eights>
__device__ __forceinline__ void multiply_values(float (&o)[c.row_tiles][eights][4], const Probabilities<c>& p,
                                                const MatrixPointer<c.dim>& v, int step) {
  std::uint32_t b[2][4];  // one is loaded while the other is multiplied
  load_matrices_transposed(b[0], v.at(16 * step, 0));
#pragma unroll
  for (int n = 0; n < eights / 2; ++n) {
    const std::uint32_t(&now)[4] = b[n % 2];
    if (n + 1 < eights / 2) load_matrices_transposed(b[(n + 1) % 2], v.at(16 * step, n + 1));
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
      multiply_matrices<T>(o[r][2 * n], p[r], now[0], now[1]);
      multiply_matrices<T>(o[r][2 * n + 1], p[r], now[2], now[3]);
    }
  }
}

/// Adds the rounded P of 16 keys to the row sums by a product with ones. O is divided by these sums, so the
/// rounding of P cancels in part.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void add_rounded(SoftmaxRows<c>& rows, const Probabilities<c>& p) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
    multiply_matrices<T>(rows.rounded[r], p[r], two_ones<T>, two_ones<T>);
  }
}

/// The tiles of a CTA in shared memory.
template <ForwardConfig c>
struct CtaTiles {
  std::byte* q_smem;  ///< [rows, dim]
  std::byte* k_smem;  ///< stages x [keys, dim]
  std::byte* v_smem;  ///< stages x [keys, dim]

  __device__ explicit CtaTiles(std::byte* shared)
      : q_smem(shared), k_smem(q_smem + c.query_bytes()), v_smem(k_smem + c.stages * c.key_bytes()) {}

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ std::byte* keys_at(int stage) const { return k_smem + stage * c.key_bytes(); }
  __device__ std::byte* values_at(int stage) const { return v_smem + stage * c.key_bytes(); }
  /// The queries of a warp.
  __device__ MatrixPointer<c.dim> queries_of(const Place<c>& place) const {
    return MatrixPointer<c.dim>::by_rows(address(q_smem + place.first_row() * c.row_bytes()));
  }
};

/// The keys that every query of a CTA sees.
struct SeenByAll {
  const int first, last;

  __device__ SeenByAll(const AttentionCall& call, const QueryRows& rows)
      : first(static_cast<int>(rows.queries.all(call).first)),
        last(static_cast<int>(rows.queries.all(call).last)) {}

  /// Whether the band or the last key may hide something in a tile of `most` keys.
  __device__ bool ends_in(const KeyTile& keys, int most) const {
    const auto first_key = static_cast<int>(keys.first);
    return first_key < first || first_key > last - most || keys.count < most;
  }
};

/// What P of the current tile is relative to, and its sums.
template <ForwardConfig c>
struct TileSums {
  float references[c.row_tiles][2], sums[c.row_tiles][2];

  template <bool general>
  __device__ __forceinline__ void begin(const Exponents<general>& exponents, const SoftmaxRows<c>& softmax) {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        references[r][half] = exponents.reference(softmax.maximum[r][half]);
        sums[r][half] = 0;
      }
    }
  }
  __device__ __forceinline__ void add_to(SoftmaxRows<c>& softmax) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[r][half] += sums[r][half];
    }
  }
};

}  // namespace tilewise::cuda::mma
