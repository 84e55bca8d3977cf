#include "cuda/gemm/simt/simt.h"

#include <algorithm>

#include "cuda/gemm/common/finish.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::gemm {
namespace {

// Tiles of 128 x 128 results, 8 x 8 a thread, their factors going through shared memory 16 summands at a
// time: the next are on their way into registers while these are multiplied. Sums of 32 summands are made in
// f32 by themselves and then added up: of 4096 one after another, the error would be several times as large.
// A thread has columns 4x to 4x + 3 of either half of a tile; where gated, the first half of b's rows are the
// gate's.

constexpr int tile = 128;
constexpr int depth = 16;
constexpr int piece = 32;  // summands
constexpr int threads = 256;
constexpr int pitch = tile + 4;
constexpr int own = tile * depth / threads;  // elements of a factor's tile that a thread loads: 8

struct alignas(16) Tiles {  // read four floats at a time
  float a[depth][pitch];
  float b[depth][pitch];
};

/// A thread's eight elements of a factor's tile: 16 summands of 128 rows.
template <typename T, bool by_rows>
struct Loader {
  const Matrix& factor;
  const std::int64_t first;  ///< row, of the tile
  const int row, summand;    ///< in the tile, of the first of eight, which follow each other in memory
  const bool aligned;
  float eight[own];

  __device__ Loader(const Matrix& factor_, std::int64_t first_, int thread)
      : factor(factor_),
        first(first_),
        row(by_rows ? thread / 2 : thread % 16 * 8),
        summand(by_rows ? thread % 2 * 8 : thread / 16),
        aligned((by_rows ? factor_.stride_row : factor_.stride_column) * static_cast<int>(sizeof(T)) % 16 ==
                    0 &&
                reinterpret_cast<std::uintptr_t>(factor_.data) % 16 == 0 && first_ % 8 == 0) {}

  __device__ void load(std::int64_t from) {
    const std::int64_t r = first + row;
    const std::int64_t k = from + summand;
    const auto* source = reinterpret_cast<const T*>(factor.data) + factor.offset(r, k);
    const std::int64_t rows = factor.rows, summands = factor.columns;
    const bool whole = by_rows ? r < rows && k + own <= summands : k < summands && r + own <= rows;
    if (whole && aligned) {
      const float4 low = load_4(source), high = load_4(source + 4);
      eight[0] = low.x, eight[1] = low.y, eight[2] = low.z, eight[3] = low.w;
      eight[4] = high.x, eight[5] = high.y, eight[6] = high.z, eight[7] = high.w;
      return;
    }
#pragma unroll
    for (int n = 0; n < own; ++n) {
      const bool there = by_rows ? r < rows && k + n < summands : k < summands && r + n < rows;
      eight[n] = there ? widen(source[n]) : 0.0f;
    }
  }

  __device__ void store(float (&to)[depth][pitch], int first_row = 0) const {
#pragma unroll
    for (int n = 0; n < own; ++n) {
      if constexpr (by_rows) {
        to[summand + n][first_row + row] = eight[n];
      } else {
        to[summand][first_row + row + n] = eight[n];
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
  // Where gated, of the 128 rows of b's tile the last 64 are b's first 64.
  const int b_row = b_by_rows ? thread / 2 : thread % 16 * 8;
  const bool of_gate = gated && b_row < tile / 2;
  Loader<T, b_by_rows> b(of_gate ? call.gate : call.b, gated && !of_gate ? first_n - tile / 2 : first_n,
                         thread);
  float sums[8][8] = {};  // of a piece
  float totals[8][8] = {};
  const auto add_up = [&] {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
      totals[n / 8][n % 8] += sums[n / 8][n % 8];
      sums[n / 8][n % 8] = 0;
    }
  };
  const auto multiply = [&](const Tiles& now) {
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      alignas(16) float left[8], right[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(left + 4 * half) =
            *reinterpret_cast<const float4*>(&now.a[k][64 * half + 4 * y]);
        *reinterpret_cast<float4*>(right + 4 * half) =
            *reinterpret_cast<const float4*>(&now.b[k][64 * half + 4 * x]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += left[i] * right[j];
      }
    }
  };

  const std::int64_t summands = call.problem.k;
  if (summands > 0) {
    a.load(0);
    b.load(0);
    a.store(tiles[0].a);
    b.store(tiles[0].b);
    __syncthreads();  // the first tiles are there
  }
  int now = 0;
  for (std::int64_t k = 0; k < summands; k += depth, now ^= 1) {
    const bool more = k + depth < summands;
    if (more) {
      a.load(k + depth);
      b.load(k + depth);
    }
    multiply(tiles[now]);
    if ((k + depth) % piece == 0) add_up();
    if (more) {
      a.store(tiles[now ^ 1].a);
      b.store(tiles[now ^ 1].b);
    }
    __syncthreads();  // the next are there, and nobody reads these any more
  }
  add_up();

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
