#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// A warp's sums of a product, m x n tiles of 16 x 16, of which each is two fragments side by side.
template <int m_tiles, int n_tiles>
using Sums = float[m_tiles][2 * n_tiles][4];

/// What multiply_tiles does besides: nothing.
struct Nothing {
  __device__ void operator()() const {}
  template <int m_tiles>
  __device__ void operator()(const std::uint32_t (&)[m_tiles][4], int) const {}
};

/// sum += a·b over `steps` times 16. `load_a(to, step)` gives all of a's fragments of a step, `load_b(to,
/// step, n)` those of 16 columns; both are asked one ahead, so that loads run beside products. `look(a,
/// step)` may use a's fragments for more. `meanwhile` is what there is to do while the first are loaded.
template <typename T, int steps, int m_tiles, int n_tiles, typename LoadA, typename LoadB,
          typename Look = Nothing, typename Meanwhile = Nothing>
__device__ __forceinline__ void multiply_tiles(Sums<m_tiles, n_tiles>& sum, const LoadA& load_a,
                                               const LoadB& load_b, const Look& look = {},
                                               const Meanwhile& meanwhile = {}) {
  std::uint32_t a[2][m_tiles][4];
  std::uint32_t b[2][4];
  load_a(a[0], 0);
  load_b(b[0], 0, 0);
  meanwhile();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int index = step * n_tiles + n;
      if (index + 1 < steps * n_tiles) {
        load_b(b[(index + 1) % 2], (index + 1) / n_tiles, (index + 1) % n_tiles);
      }
      if (n == n_tiles - 1 && step + 1 < steps) load_a(a[(step + 1) % 2], step + 1);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        multiply_matrices<T>(sum[m][2 * n], a[step % 2][m], b[index % 2][0], b[index % 2][1]);
        multiply_matrices<T>(sum[m][2 * n + 1], a[step % 2][m], b[index % 2][2], b[index % 2][3]);
      }
    }
    look(a[step % 2], step);
  }
}

/// Loads of fragments from a tile in shared memory. `a` and `b` by rows: [m, k], and [n, k]. Turned: [k, m]
/// and [k, n]. A pointer's columns begin where the warp's do.
template <int m_tiles, int dim>
__device__ __forceinline__ auto a_by_rows(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[m_tiles][4], int step) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_matrices(to[m], at.at(16 * m, step));
  };
}
template <int m_tiles, int dim>
__device__ __forceinline__ auto a_turned(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[m_tiles][4], int step) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_matrices_turned(to[m], at.at(16 * step, m));
  };
}
template <int dim>
__device__ __forceinline__ auto b_by_rows(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[4], int step, int n) { load_matrices(to, at.at(16 * n, step)); };
}
template <int dim>
__device__ __forceinline__ auto b_turned(const MatrixPointer<dim>& at) {
  return [at](std::uint32_t(&to)[4], int step, int n) { load_matrices_turned(to, at.at(16 * step, n)); };
}

}  // namespace tilewise::cuda::mma
