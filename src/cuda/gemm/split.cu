#include "cuda/gemm/split.h"

#include "core/arena.h"
#include "cuda/gemm/rows.cuh"

namespace tilewise::cuda::gemm {
namespace {

constexpr int terms_of(const GemmProblem& problem) { return problem.allow_tf32 ? 3 : 6; }

/// parts [parts, rows, columns] by rows, whose stride is a multiple of 8.
struct Parts {
  __nv_bfloat16* data = nullptr;
  std::int64_t stride = 0;
  int count = 0;

  Matrix matrix(const Matrix& of) const {
    return {.data = reinterpret_cast<std::byte*>(data),
            .dtype = DType::bf16,
            .rows = of.rows * count,
            .columns = of.columns,
            .stride_row = stride};
  }
};

Parts take_parts(Arena& arena, const Matrix& of, int count) {
  const std::int64_t stride = (of.columns + 7) / 8 * 8;
  return {arena.take<__nv_bfloat16>(of.rows * stride * count), stride, count};
}

// Squares of 32 x 32 elements, turned in shared memory where the factor lies by columns.
constexpr int square = 32;
constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    split_kernel(const __grid_constant__ Matrix factor, const __grid_constant__ Parts parts, int across) {
  __shared__ float turned[square][square + 1];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x / across) * square;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x % across) * square;
  const int lane = static_cast<int>(threadIdx.x) % square, line = static_cast<int>(threadIdx.x) / square;
  const auto* from = reinterpret_cast<const float*>(factor.data);
  const bool by_rows = factor.by_rows();
#pragma unroll
  for (int n = line; n < square; n += threads / square) {
    const std::int64_t row = first_row + (by_rows ? n : lane), column = first_column + (by_rows ? lane : n);
    const bool there = row < factor.rows && column < factor.columns;
    turned[by_rows ? n : lane][by_rows ? lane : n] = there ? from[factor.offset(row, column)] : 0.0f;
  }
  __syncthreads();  // the square is there
#pragma unroll
  for (int n = line; n < square; n += threads / square) {
    const std::int64_t row = first_row + n, column = first_column + lane;
    if (row >= factor.rows || column >= factor.columns) continue;
    float rest = turned[n][lane];
    for (int part = 0; part < parts.count; ++part) {
      const __nv_bfloat16 piece = narrow<__nv_bfloat16>(rest);
      parts.data[(part * factor.rows + row) * parts.stride + column] = piece;
      rest -= widen(piece);
    }
  }
}

void split(const Matrix& factor, const Parts& parts, const Context& context) {
  const std::int64_t across = (factor.columns + square - 1) / square;
  launch<split_kernel>({.name = "tilewise splitting into bf16",
                        .blocks = (factor.rows + square - 1) / square * across,
                        .threads = threads,
                        .stream = static_cast<cudaStream_t>(context.stream)},
                       factor, parts, static_cast<int>(across));
}

struct SplitFactors {
  Parts a, b, gate;
};

SplitFactors take_factors(Arena& arena, const GemmCall& call) {
  const int count = parts_of(terms_of(call.problem));
  SplitFactors factors{take_parts(arena, call.a, count), take_parts(arena, call.b, count), {}};
  if (call.problem.gated) factors.gate = take_parts(arena, call.gate, count);
  return factors;
}

}  // namespace

std::size_t split_workspace(const GemmCall& call, const Context&) {
  Arena arena(nullptr);
  take_factors(arena, call);
  return arena.used();
}

void run_split(const GemmCall& call, const Context& context) {
  Arena arena(context.workspace.data);
  const SplitFactors factors = take_factors(arena, call);
  GemmCall parts = call;
  const auto replace = [&](Matrix& factor, const Parts& with) {
    split(factor, with, context);
    factor = with.matrix(factor);
  };
  replace(parts.a, factors.a);
  replace(parts.b, factors.b);
  if (call.problem.gated) replace(parts.gate, factors.gate);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  const auto run = [&]<int terms>() {
    call.problem.gated ? run_row<__nv_bfloat16, Split<terms, true>, 0>(parts, multiprocessors, stream)
                       : run_row<__nv_bfloat16, Split<terms, false>, 0>(parts, multiprocessors, stream);
  };
  terms_of(call.problem) == 3 ? run.template operator()<3>() : run.template operator()<6>();
}

}  // namespace tilewise::cuda::gemm
