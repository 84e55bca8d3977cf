#pragma once

namespace tilewise::cuda {

// Register-blocked products of f32 tiles in shared memory. Thread (row, column) of a grid of R x C threads
// holds M rows row + R·m, and columns in runs of four: 4·column + 4·C·run.

template <int R_, int C_>
struct ThreadGrid {
  static constexpr int rows = R_;
  static constexpr int columns = C_;
  static constexpr int threads = R_ * C_;
  int row, column;
  __device__ ThreadGrid() : row(threadIdx.x / C_), column(threadIdx.x % C_) {}

  /// The thread's m-th row and n-th column.
  __device__ int own(int m) const { return row + R_ * m; }
  __device__ int other(int n) const { return column * 4 + n / 4 * 4 * C_ + n % 4; }
};

/// sum[m][n] += Σ_k a[row m][k]·b[column n][k]: both by rows, over `chunks` chunks of four.
template <int M, int N, typename Grid, typename TileA, typename TileB>
__device__ __forceinline__ void multiply_rows(float (&sum)[M][N], const float* a_smem, const float* b_smem,
                                              int chunks, const Grid& grid) {
  const float4* a_row = reinterpret_cast<const float4*>(a_smem) + grid.row * TileA::chunks;
  const float4* b_row = reinterpret_cast<const float4*>(b_smem) + grid.column * 4 * TileB::chunks;
  const int a_swizzle = TileA::swizzle(grid.row);  // the same for all of the thread's rows, and so for b
  const int b_swizzle = TileB::swizzle(grid.column * 4);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    float4 a[M];
#pragma unroll
    for (int m = 0; m < M; ++m) a[m] = a_row[m * Grid::rows * TileA::chunks + (chunk ^ a_swizzle)];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int column = n / 4 * 4 * Grid::columns + n % 4;
      const float4 b = b_row[column * TileB::chunks + (chunk ^ b_swizzle)];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        sum[m][n] = fmaf(a[m].x, b.x, sum[m][n]);
        sum[m][n] = fmaf(a[m].y, b.y, sum[m][n]);
        sum[m][n] = fmaf(a[m].z, b.z, sum[m][n]);
        sum[m][n] = fmaf(a[m].w, b.w, sum[m][n]);
      }
    }
  }
}

/// sum[m][n] += Σ_k a[row m][k]·b[k][column n]: a by rows, b by columns, over `chunks` chunks of four. Four
/// rows of b that make a chunk of a must share their swizzle.
template <int M, int N, typename Grid, typename TileA, typename TileB>
__device__ __forceinline__ void multiply_columns(float (&sum)[M][N], const float* a_smem, const float* b_smem,
                                                 int chunks, const Grid& grid) {
  const float4* a_row = reinterpret_cast<const float4*>(a_smem) + grid.row * TileA::chunks;
  const float4* b_rows = reinterpret_cast<const float4*>(b_smem);
  const int a_swizzle = TileA::swizzle(grid.row);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    float4 a[M];
#pragma unroll
    for (int m = 0; m < M; ++m) a[m] = a_row[m * Grid::rows * TileA::chunks + (chunk ^ a_swizzle)];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        const int column = (grid.column + n / 4 * Grid::columns) ^ TileB::swizzle(chunk * 4);
        const float4 b = b_rows[(chunk * 4 + k) * TileB::chunks + column];
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const float x = k == 0 ? a[m].x : k == 1 ? a[m].y : k == 2 ? a[m].z : a[m].w;
          sum[m][n] = fmaf(x, b.x, sum[m][n]);
          sum[m][n + 1] = fmaf(x, b.y, sum[m][n + 1]);
          sum[m][n + 2] = fmaf(x, b.z, sum[m][n + 2]);
          sum[m][n + 3] = fmaf(x, b.w, sum[m][n + 3]);
        }
      }
    }
  }
}

/// A grid of R x C threads, each with rows and columns in runs of four: 4·row + 4·R·run and 4·column +
/// 4·C·run.
template <int R_, int C_>
struct BlockedGrid {
  static constexpr int rows = R_;
  static constexpr int columns = C_;
  static constexpr int threads = R_ * C_;
  int row, column;
  __device__ BlockedGrid() : row(threadIdx.x / C_), column(threadIdx.x % C_) {}

  /// The thread's m-th row and n-th column.
  __device__ int own(int m) const { return row * 4 + m / 4 * 4 * R_ + m % 4; }
  __device__ int other(int n) const { return column * 4 + n / 4 * 4 * C_ + n % 4; }
};

/// sum[m][n] += Σ_k a[k][row m]·b[k][column n] for k below `depth`, a multiple of eight: an outer product a
/// step. The next step's operands are loaded while this one's are multiplied; without that, half of the time
/// is spent waiting.
template <typename TileA, typename TileB, int M, int N, typename Grid>
__device__ __forceinline__ void multiply_turned(float (&sum)[M][N], const float* a_smem, const float* b_smem,
                                                int depth, const Grid& grid) {
  const float4* a_chunks = reinterpret_cast<const float4*>(a_smem);
  const float4* b_chunks = reinterpret_cast<const float4*>(b_smem);
  float4 a[2][M / 4], b[2][N / 4];
  const auto load = [&](int k, int slot) {
#pragma unroll
    for (int m = 0; m < M / 4; ++m) a[slot][m] = a_chunks[TileA::chunk(k, grid.row + m * Grid::rows)];
#pragma unroll
    for (int n = 0; n < N / 4; ++n) b[slot][n] = b_chunks[TileB::chunk(k, grid.column + n * Grid::columns)];
  };
  load(0, 0);
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int slot = step % 2;
      load(step < 7 ? k + step + 1 : k + 8 < depth ? k + 8 : 0, 1 - slot);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float4 a4 = a[slot][m / 4];
        const float x = m % 4 == 0 ? a4.x : m % 4 == 1 ? a4.y : m % 4 == 2 ? a4.z : a4.w;
#pragma unroll
        for (int n = 0; n < N; n += 4) {
          const float4 b4 = b[slot][n / 4];
          sum[m][n] = fmaf(x, b4.x, sum[m][n]);
          sum[m][n + 1] = fmaf(x, b4.y, sum[m][n + 1]);
          sum[m][n + 2] = fmaf(x, b4.z, sum[m][n + 2]);
          sum[m][n + 3] = fmaf(x, b4.w, sum[m][n + 3]);
        }
      }
    }
  }
}

}  // namespace tilewise::cuda
