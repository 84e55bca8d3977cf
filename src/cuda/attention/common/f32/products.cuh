#pragma once

#include "cuda/attention/common/f32/split.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma_f32 {

// Products of split numbers: low·high + high·low + high·high; low·low is too small to matter. Tensor cores
// truncate when they accumulate, which shows from about 32 terms on. So an accumulator takes 32 terms, and is
// then added to the sum in ordinary f32.

/// Steps of 16 terms that one accumulator takes.
inline constexpr int steps_per_sum = 2;

/// One fragment of each part.
template <auto c>
using Parts = std::uint32_t[c.parts][4];

/// Loads the fragments of row tiles that are 16 rows apart.
template <auto c, int part_bytes>
__device__ __forceinline__ void load_rows(Parts<c> (&to)[c.row_tiles], const MatrixPointer<c.dim>& at,
                                          int step) {
#pragma unroll
  for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
    for (int part = 0; part < c.parts; ++part) {
      load_matrices(to[r][part], at.at(16 * r, step) + part * part_bytes);
    }
  }
}

/// sum += A·B over `steps` steps of 16 terms, for `count` fragments of B of 16 columns and all row tiles of
/// A. Products of low parts come first, because truncation takes most when the sum has its full size.
/// Products of one accumulator wait for each other, so those of all accumulators are interleaved. With
/// `overwrites` the first product of an accumulator overwrites it.
template <int parts, int row_tiles, int count, int steps>
__device__ __forceinline__ void add_products(float (&sum)[count][row_tiles][2][4],
                                             const std::uint32_t (&a)[steps][row_tiles][parts][4],
                                             const std::uint32_t (&b)[steps][count][parts][4],
                                             bool overwrites) {
  // The part of A and of B in each of the three products.
  constexpr int part_of_a[] = {1, 0, 0};
  constexpr int part_of_b[] = {0, 1, 0};
  constexpr int first = parts == 2 ? 0 : 2;
  constexpr int low = steps * (2 - first);  // products with a low part
#pragma unroll
  for (int index = 0; index < low + steps; ++index) {
    const int step = index < low ? index / 2 : index - low;
    const int product = index < low ? index % 2 : 2;
#pragma unroll
    for (int n = 0; n < count; ++n) {
#pragma unroll
      for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const std::uint32_t(&from)[4] = a[step][r][part_of_a[product]];
          const std::uint32_t(&with)[4] = b[step][n][part_of_b[product]];
          if (overwrites && index == 0) {
            product_of_matrices<__half>(sum[n][r][e], from, with[2 * e], with[2 * e + 1]);
          } else {
            multiply_matrices<__half>(sum[n][r][e], from, with[2 * e], with[2 * e + 1]);
          }
        }
      }
    }
  }
}

/// S = A·Bᵀ over all dims. B is a tile of c.keys rows in shared memory, and `get` gives fragments of A.
template <auto c, int part_bytes, typename Get>
__device__ __forceinline__ void multiply_tile(float (&s)[c.row_tiles][c.keys / 8][4], const Get& get,
                                              std::uint32_t tile_smem) {
  constexpr int count = c.keys_at_once / 16;
  constexpr int steps = c.parts == 2 ? steps_per_sum : c.dim / 16;
  const auto b_at = MatrixPointer<c.dim>::by_columns(tile_smem);
#pragma unroll
  for (int first = 0; first < c.dim / 16; first += steps) {
    float part[c.keys / c.keys_at_once][count][c.row_tiles][2][4];
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      Parts<c> a[1][c.row_tiles];
      get(a[0], step);
#pragma unroll
      for (int some = 0; some < c.keys / c.keys_at_once; ++some) {
        Parts<c> b[1][count];
#pragma unroll
        for (int n = 0; n < count; ++n) {
#pragma unroll
          for (int p = 0; p < c.parts; ++p) {
            load_matrices(b[0][n][p], b_at.at(some * c.keys_at_once + 16 * n, step) + p * part_bytes);
          }
        }
        add_products(part[some], a, b, step == first);
      }
    }
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < c.keys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float more = part[n / 2 / count][n / 2 % count][r][n % 2][e];
          s[r][n][e] = first == 0 ? more : s[r][n][e] + more;
        }
      }
    }
  }
}

/// P or dS of a tile of c.keys columns, as fragments of operand A.
template <auto c>
using ScoreFragments = Parts<c>[c.keys / 16][c.row_tiles];

/// sum += factor · P·B, where B is a tile of c.keys rows in shared memory. With one part, tensor cores add to
/// the sum itself, and P has the factor already.
template <auto c, int part_bytes>
__device__ __forceinline__ void add_tile(float (&sum)[c.row_tiles][c.dim / 8][4], const ScoreFragments<c>& p,
                                         std::uint32_t tile_smem, float factor) {
  constexpr int count = c.dims_at_once / 16;
  const auto b_at = MatrixPointer<c.dim>::by_rows(tile_smem);
#pragma unroll
  for (int some = 0; some < c.dim / 16; some += count) {
    float part[count][c.row_tiles][2][4];
    // Calls `body` with each element of the sum and the same one of its accumulator.
    const auto each = [&](const auto& body) {
#pragma unroll
      for (int n = 0; n < count; ++n) {
#pragma unroll
        for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int x = 0; x < 4; ++x) body(sum[r][2 * (some + n) + e][x], part[n][r][e][x]);
          }
        }
      }
    };
    if constexpr (c.parts == 1) each([](const float& before, float& more) { more = before; });
#pragma unroll
    for (int step = 0; step < c.keys / 16; step += c.steps_at_once) {
      Parts<c> b[c.steps_at_once][count];
#pragma unroll
      for (int n = 0; n < c.steps_at_once * count * c.parts; ++n) {
        const int more = n / c.parts / count, dim = n / c.parts % count;
        load_matrices_transposed(b[more][dim][n % c.parts],
                                 b_at.at(16 * (step + more), some + dim) + n % c.parts * part_bytes);
      }
      const auto& factors = reinterpret_cast<const Parts<c>(&)[c.steps_at_once][c.row_tiles]>(p[step]);
      add_products(part, factors, b, c.parts == 2 && step == 0);
    }
    each([&](float& to, const float& more) { to = c.parts == 1 ? more : fmaf(more, factor, to); });
  }
}

/// The sum of products with tiles whose numbers are scaled by 2^exponent, an exponent per tile.
template <auto c>
struct ScaledSum {
  float sum[c.row_tiles][c.dim / 8][4] = {};
  int exponent = 254;  ///< the sum is scaled by 2^exponent; at first higher than any tile's

  /// Lowers the sum's exponent to that of a tile with larger numbers than those before. Returns the factor of
  /// the tile's products.
  __device__ float rescale_for(int tile_exponent) {
    if (tile_exponent < exponent) {
      const float rescale = power_of_two(max(tile_exponent - exponent, -126));
      exponent = tile_exponent;
#pragma unroll
      for (int n = 0; n < c.row_tiles * c.dim / 2; ++n)
        sum[n / (c.dim / 2)][n % (c.dim / 2) / 4][n % 4] *= rescale;
    }
    return power_of_two(max(exponent - tile_exponent, -126));
  }
  /// Two powers of two whose product is 2^-exponent, which alone may overflow.
  struct Powers {
    float first, second;
  };
  __device__ Powers powers_back() const {
    const int half = exponent / 2;
    return {power_of_two(-half), power_of_two(half - exponent)};
  }
  /// x · 2^-exponent, where x is as large as the sum.
  __device__ float scaled_back(float x) const {
    const auto [first, second] = powers_back();
    return x * first * second;
  }
};

}  // namespace tilewise::cuda::mma_f32
