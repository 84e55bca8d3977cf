#include "cuda/gemm/simt/simt.h"

#include <algorithm>

#include "cuda/gemm/common/finish.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::gemm {
namespace {

// A CTA computes a tile of 128 x 128 results, a thread 8 x 8 of them. Tiles of A and B go through shared
// memory, 16 of K at a time; the next ones are loaded into registers while the current ones are multiplied. A
// thread has rows 4y to 4y + 3 and columns 4x to 4x + 3 of either half of the tile. With a gate, the first
// half of B's rows are the gate's, so that both accumulators of an element are in one thread.
//
// Accumulators are added to totals every 32 of K. If 4096 products were added one after another, the error
// would be several times as large.

constexpr int tile = 128;
constexpr int depth = 16;               // of K in shared memory
constexpr int promotion_interval = 32;  // of K
constexpr int threads = 256;
constexpr int pitch = tile + 4;
constexpr int per_thread = tile * depth / threads;  // elements of a tile of A or B that a thread loads: 8

struct alignas(16) Tiles {  // threads read four floats at a time
  float a[depth][pitch];
  float b[depth][pitch];
};

/// A thread's eight elements of a tile of an operand, 128 rows by 16 of K. They are contiguous in memory.
template <typename T, bool by_rows>
struct Loader {
  const Matrix& operand;
  const std::int64_t first;  ///< row of the tile
  const int row, k;          ///< in the tile, of the first of the eight
  const bool aligned;
  float eight[per_thread];

  __device__ Loader(const Matrix& operand_, std::int64_t first_, int thread)
      : operand(operand_),
        first(first_),
        row(by_rows ? thread / 2 : thread % 16 * 8),
        k(by_rows ? thread % 2 * 8 : thread / 16),
        aligned((by_rows ? operand_.stride_row : operand_.stride_column) * static_cast<int>(sizeof(T)) % 16 ==
                    0 &&
                reinterpret_cast<std::uintptr_t>(operand_.data) % 16 == 0 && first_ % 8 == 0) {}

  __device__ void load(std::int64_t from) {
    const std::int64_t r = first + row;
    const std::int64_t c = from + k;
    const auto* source = reinterpret_cast<const T*>(operand.data) + operand.offset(r, c);
    const std::int64_t rows = operand.rows, columns = operand.columns;
    const bool whole =
        by_rows ? r < rows && c + per_thread <= columns : c < columns && r + per_thread <= rows;
    if (whole && aligned) {
      const float4 low = load_4(source), high = load_4(source + 4);
      eight[0] = low.x, eight[1] = low.y, eight[2] = low.z, eight[3] = low.w;
      eight[4] = high.x, eight[5] = high.y, eight[6] = high.z, eight[7] = high.w;
      return;
    }
#pragma unroll
    for (int n = 0; n < per_thread; ++n) {
      const bool inside = by_rows ? r < rows && c + n < columns : c < columns && r + n < rows;
      eight[n] = inside ? widen(source[n]) : 0.0f;
    }
  }

  __device__ void store(float (&to)[depth][pitch], int first_row = 0) const {
#pragma unroll
    for (int n = 0; n < per_thread; ++n) {
      if constexpr (by_rows) {
        to[k + n][first_row + row] = eight[n];
      } else {
        to[k][first_row + row + n] = eight[n];
      }
    }
  }
};

template <typename T, bool a_by_rows, bool b_by_rows>
__global__ void __launch_bounds__(threads)
    simt_kernel(const __grid_constant__ GemmCall call, int tiles_n, TileMarks marks) {
  __shared__ Tiles tiles[2];
  const bool gated = call.problem.gated;
  const int columns = gated ? tile / 2 : tile;  // of the result
  const std::int64_t first_m = static_cast<std::int64_t>(blockIdx.x / tiles_n) * tile;
  const std::int64_t first_n = static_cast<std::int64_t>(blockIdx.x % tiles_n) * columns;
  if (marks.rows != nullptr && (marks.rows[first_m / tile] | marks.columns[first_n / tile]) == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int x = thread % 16, y = thread / 16;

  Loader<T, a_by_rows> a(call.a, first_m, thread);
  // With a gate, the tile of B has 64 rows of the gate and then 64 of B, which start at first_n, too.
  const int b_row = b_by_rows ? thread / 2 : thread % 16 * 8;
  const bool of_gate = gated && b_row < tile / 2;
  Loader<T, b_by_rows> b(of_gate ? call.gate : call.b, gated && !of_gate ? first_n - tile / 2 : first_n,
                         thread);
  float accumulators[8][8] = {};
  float totals[8][8] = {};
  const auto promote = [&] {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
      totals[n / 8][n % 8] += accumulators[n / 8][n % 8];
      accumulators[n / 8][n % 8] = 0;
    }
  };
  const auto multiply = [&](const Tiles& now) {
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      alignas(16) float a_rmem[8], b_rmem[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(a_rmem + 4 * half) =
            *reinterpret_cast<const float4*>(&now.a[k][64 * half + 4 * y]);
        *reinterpret_cast<float4*>(b_rmem + 4 * half) =
            *reinterpret_cast<const float4*>(&now.b[k][64 * half + 4 * x]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) accumulators[i][j] += a_rmem[i] * b_rmem[j];
      }
    }
  };

  const std::int64_t all_k = call.problem.k;
  if (all_k > 0) {
    a.load(0);
    b.load(0);
    a.store(tiles[0].a);
    b.store(tiles[0].b);
    __syncthreads();  // the first tiles are in shared memory
  }
  int now = 0;
  for (std::int64_t k = 0; k < all_k; k += depth, now ^= 1) {
    const bool more = k + depth < all_k;
    if (more) {
      a.load(k + depth);
      b.load(k + depth);
    }
    multiply(tiles[now]);
    if ((k + depth) % promotion_interval == 0) promote();
    if (more) {
      a.store(tiles[now ^ 1].a);
      b.store(tiles[now ^ 1].b);
    }
    __syncthreads();  // the next tiles are in shared memory, and no thread reads the current ones any more
  }
  promote();

  for (int i = 0; i < 8; ++i) {
    const std::int64_t m = first_m + i / 4 * 64 + 4 * y + i % 4;
    for (int j = 0; j < (gated ? 4 : 8); ++j) {
      const std::int64_t n = first_n + j / 4 * 64 + 4 * x + j % 4;
      gated ? finish_element<T, false>(call, m, n, totals[i][4 + j % 4], totals[i][j])
            : finish_element<T, false>(call, m, n, totals[i][j], 0);
    }
  }
}

template <typename T>
void run_of(const GemmCall& call, const Context& context, const TileMarks& marks = {}) {
  const GemmProblem& problem = call.problem;
  const int columns = problem.gated ? tile / 2 : tile;
  const std::int64_t tiles_n = (problem.n + columns - 1) / columns;
  const Launch how{.name = "tilewise simt gemm",
                   .blocks = (problem.m + tile - 1) / tile * tiles_n,
                   .threads = threads,
                   .stream = static_cast<cudaStream_t>(context.stream)};
  const int across = static_cast<int>(tiles_n);
  if (problem.a_by_rows) {
    problem.b_by_rows ? launch<simt_kernel<T, true, true>>(how, call, across, marks)
                      : launch<simt_kernel<T, true, false>>(how, call, across, marks);
  } else {
    problem.b_by_rows ? launch<simt_kernel<T, false, true>>(how, call, across, marks)
                      : launch<simt_kernel<T, false, false>>(how, call, across, marks);
  }
}

}  // namespace

void run_simt_marked(const GemmCall& call, const TileMarks& marks, const Context& context) {
  run_of<float>(call, context, marks);
}

void run_simt(const GemmCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { run_of<T>(call, context); });
}

}  // namespace tilewise::cuda::gemm
