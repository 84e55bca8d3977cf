#pragma once

namespace tilewise::cuda {

// Register-blocked products of f32 tiles in shared memory. Each warp computes a product of its own and walks
// over K. A warp is R x C lanes, each of which holds M rows and N columns of the result. An operand has one
// of two layouts:
//
//   transposed  [K, rows]  a lane's rows are runs of four, 4·lane + 4·R·run: one 16-byte load per run and k
//   by rows     [rows, K]  a lane's rows are lane + R·m: one 16-byte load per row and four k
//
// Either way 16 loads feed 256 multiply-adds of an 8 x 8 block. What counts is that the loop has no other
// instructions. So strides are known at compile time, which makes addresses constants; operands are loaded
// one step ahead; and results are visited back and forth, so that neighbouring multiply-adds share a factor
// even at the end of a row. (Registers lie in two banks: measured, fewer operand fetches give fewer stalls.)

/// A warp as R x (32 / R) lanes, either row after row or interleaved. Interleaved, neighbouring lanes share a
/// column, and lanes at a distance of two share a row. Shared memory serves a 16-byte load in two cycles
/// where both lanes of each pair of one of these two kinds read the same address, and in four cycles
/// otherwise (measured on an H200). With lanes row after row, only the operand that lanes of a row share is
/// that fast.
template <int R, bool interleaved = false>
struct Lanes {
  static constexpr int rows = R;
  static constexpr int columns = 32 / R;
  static constexpr int apart = interleaved ? 2 : 1;  ///< distance in lanes from one column to the next
  static_assert(R % apart == 0);
  int row, column;
  __device__ Lanes()
      : row(interleaved ? lane() % 2 + lane() / (2 * columns) * 2 : lane() / columns),
        column(interleaved ? lane() / 2 % columns : static_cast<int>(threadIdx.x) % columns) {}
  /// The lane of the same row in column `other`.
  __device__ int in_row(int other) const {
    return interleaved ? row % 2 + row / 2 * (2 * columns) + other * 2 : row * columns + other;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
};

/// Index of a lane's n-th row or column of a transposed operand, or of the result along that operand.
template <int lanes>
__device__ __forceinline__ constexpr int in_runs(int lane, int n) {
  return lane * 4 + n / 4 * 4 * lanes + n % 4;
}
/// The same for an operand by rows.
template <int lanes>
__device__ __forceinline__ constexpr int in_steps(int lane, int n) {
  return lane + lanes * n;
}

__device__ __forceinline__ float element(const float4& four, int n) {
  return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}
__device__ __forceinline__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
/// n-th of 0, 1, …, count − 1, or with `back` of count − 1, …, 1, 0.
__device__ __forceinline__ constexpr int back_and_forth(bool back, int n, int count) {
  return back ? count - 1 - n : n;
}

/// A transposed operand from the lane's first element on: [K, stride] floats, with `lanes` lanes along a row.
template <int stride, int lanes>
struct Transposed {
  const float* first;
  __device__ float4 at(int k, int run) const { return load_four(first + k * stride + run * 4 * lanes); }
  __device__ Transposed from(int k) const { return {first + k * stride}; }
};

/// The same with `pad` floats, a multiple of four, after every four rows of K, so that threads that write
/// several rows of K at a time have no bank conflict.
template <int stride, int lanes, int pad>
struct PaddedTransposed {
  const float* first;
  __host__ __device__ static constexpr int offset(int k) {
    return k * (stride + pad / 4) - (k & 3) * (pad / 4);
  }
  __device__ float4 at(int k, int run) const { return load_four(first + offset(k) + run * 4 * lanes); }
};

/// An operand by rows from the lane's first row on: [rows, stride] floats, every `lanes`-th row the lane's.
template <int stride, int lanes>
struct ByRows {
  const float* first;
  /// Four elements from k on.
  __device__ float4 at(int row, int k) const { return load_four(first + row * lanes * stride + k); }
  __device__ ByRows from(int k) const { return {first + k}; }
};

/// sum[m][n] += Σ_k a[k][m]·b[k][n] for k below `depth`, a multiple of eight. Both operands are transposed.
template <typename A, typename B, int M, int N>
__device__ __forceinline__ void multiply_transposed(float (&sum)[M][N], const A& a, const B& b, int depth) {
  float4 a4[2][M / 4], b4[2][N / 4];
  const auto load = [&](int k, int slot) {
#pragma unroll
    for (int m = 0; m < M / 4; ++m) a4[slot][m] = a.at(k, m);
#pragma unroll
    for (int n = 0; n < N / 4; ++n) b4[slot][n] = b.at(k, n);
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
#pragma unroll
        for (int visit = 0; visit < N; ++visit) {
          const int n = back_and_forth(m % 2 == 1, visit, N);
          sum[m][n] = fmaf(element(a4[slot][m / 4], m % 4), element(b4[slot][n / 4], n % 4), sum[m][n]);
        }
      }
    }
  }
}

/// The same, but the product has an accumulator of its own before it is added to `sum`: the error of a
/// running sum grows with its length. Takes as many more registers as `sum` has.
template <typename A, typename B, int M, int N>
__device__ __forceinline__ void add_product(float (&sum)[M][N], const A& a, const B& b, int depth) {
  float product[M][N] = {};
  multiply_transposed(product, a, b, depth);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) sum[m][n] += product[m][n];
  }
}

/// sum[m][n] += Σ_k a[k][m]·b[n][k]: a is transposed, b is by rows.
template <typename A, typename B, int M, int N>
__device__ __forceinline__ void multiply_transposed_rows(float (&sum)[M][N], const A& a, const B& b,
                                                         int depth) {
  float4 a4[2][M / 4], b4[N];
  const auto load_a = [&](int k, int slot) {
#pragma unroll
    for (int m = 0; m < M / 4; ++m) a4[slot][m] = a.at(k, m);
  };
  load_a(0, 0);
#pragma unroll
  for (int n = 0; n < N; ++n) b4[n] = b.at(n, 0);
  const auto four = [&](int k, int next) {  // computes four k and loads the first of the next four
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int slot = step % 2;
      load_a(step < 3 ? k + step + 1 : next, 1 - slot);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int visit = 0; visit < M; ++visit) {
          const int m = back_and_forth(n % 2 == 1, visit, M);
          sum[m][n] = fmaf(element(a4[slot][m / 4], m % 4), element(b4[n], step), sum[m][n]);
        }
        if (step == 3) b4[n] = b.at(n, next);
      }
    }
  };
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
    four(k, k + 4);
    four(k + 4, k + 8 < depth ? k + 8 : 0);
  }
}

/// sum[m][n] += Σ_k a[m][k]·b[n][k]: both are by rows.
template <typename A, typename B, int M, int N>
__device__ __forceinline__ void multiply_rows(float (&sum)[M][N], const A& a, const B& b, int depth) {
  static_assert(N % 2 == 0 && N >= M);
  float4 a4[2][M], b4[2];
#pragma unroll
  for (int m = 0; m < M; ++m) a4[0][m] = a.at(m, 0);
  b4[0] = b.at(0, 0);
  const auto four = [&](const float4(&now)[M], float4(&then)[M], int k, int next) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      b4[1 - n % 2] = n + 1 < N ? b.at(n + 1, k) : b.at(0, next);
      if (n < M) then[n] = a.at(n, next);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int visit = 0; visit < M; ++visit) {
          const int m = back_and_forth(step % 2 == 1, visit, M);
          sum[m][n] = fmaf(element(now[m], step), element(b4[n % 2], step), sum[m][n]);
        }
      }
    }
  };
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
    four(a4[0], a4[1], k, k + 4);
    four(a4[1], a4[0], k + 4, k + 8 < depth ? k + 8 : 0);
  }
}

/// Whether a configuration sums a product in runs of a few k: with long rows, or with small tiles, which
/// calls with one query get. For such problems other implementations sum in several lanes, which is more
/// exact than one running sum.
template <typename C>
inline constexpr bool sums_in_runs = C::dim > 64 || C::M* C::N <= 16;

/// Gives each run of 32 k an accumulator of its own. `multiply(sum, a, b, depth)` is one of the functions
/// above.
template <typename A, typename B, int M, int N, typename Multiply>
__device__ __forceinline__ void multiply_in_runs(float (&sum)[M][N], const A& a, const B& b, int depth,
                                                 const Multiply& multiply) {
  constexpr int longest = 32;
#pragma unroll 1
  for (int k = 0; k < depth; k += longest) {
    float part[M][N] = {};
    multiply(part, a.from(k), b.from(k), min(longest, depth - k));
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) sum[m][n] += part[m][n];
    }
  }
}

/// sum[m][n] += Σ_k a[m][k]·b[k][n]: a is by rows, b is transposed.
template <typename A, typename B, int M, int N>
__device__ __forceinline__ void multiply_rows_transposed(float (&sum)[M][N], const A& a, const B& b,
                                                         int depth) {
  float4 a4[2][M], b4[2][N / 4];
  const auto load_b = [&](int k, int slot) {
#pragma unroll
    for (int n = 0; n < N / 4; ++n) b4[slot][n] = b.at(k, n);
  };
#pragma unroll
  for (int m = 0; m < M; ++m) a4[0][m] = a.at(m, 0);
  load_b(0, 0);
  const auto four = [&](const float4(&now)[M], float4(&then)[M], int k, int next) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int slot = step % 2;
      load_b(step < 3 ? k + step + 1 : next, 1 - slot);
#pragma unroll
      for (int m = step * M / 4; m < (step + 1) * M / 4; ++m) {
        then[m] = a.at(m, next);
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int visit = 0; visit < N; ++visit) {
          const int n = back_and_forth(m % 2 == 1, visit, N);
          sum[m][n] = fmaf(element(now[m], step), element(b4[slot][n / 4], n % 4), sum[m][n]);
        }
      }
    }
  };
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
    four(a4[0], a4[1], k, k + 4);
    four(a4[1], a4[0], k + 4, k + 8 < depth ? k + 8 : 0);
  }
}

}  // namespace tilewise::cuda
