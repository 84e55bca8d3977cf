#pragma once

#include "cuda/gemm/sm90/tiles/choice.h"
#include "cuda/gemm/sm90/tiles/kernel.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::gemm {

// From a call to the row of a tuning table that it uses.

/// The tensor map of an operand [length, K], with boxes of `rows` of its rows; if transposed, with boxes of
/// 64 of K.
inline CUtensorMap map_of_factor(const Matrix& factor, bool transposed, int rows) {
  return transposed
             ? map_of_matrix(factor.data, factor.dtype, factor.columns, factor.rows, factor.stride_column,
                             GemmConfig::depth)
             : map_of_matrix(factor.data, factor.dtype, factor.rows, factor.columns, factor.stride_row, rows);
}

template <typename T, typename Table, int row>
void run_row(const GemmCall& call, int multiprocessors, cudaStream_t stream) {
  constexpr GemmConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  GemmMaps maps{.a = map_of_factor(call.a, c.transposed_a, c.a_box()),
                .b = map_of_factor(call.b, c.transposed_b, c.b_box())};
  maps.gate = c.gated ? map_of_factor(call.gate, c.transposed_b, c.b_box()) : maps.b;
  const auto map_of_out = [&](int columns) {
    return c.wide ? maps.b
                  : map_of_matrix(call.out.data, call.out.dtype, problem.m, problem.n, call.out.stride_row,
                                  16, columns);
  };
  maps.out = map_of_out(64);
  maps.out_rest = c.out_columns() % 64 == 0 ? maps.out : map_of_out(c.out_columns() % 64);
  // A pair of CTAs takes two neighbouring tiles, which count as one in the order.
  const int tiles_m = tiles_of(problem.m, c.rows_together());
  const int tiles_n = tiles_of(problem.n, c.columns_together());
  const int pairs =
      static_cast<int>(std::min<std::int64_t>(std::int64_t{tiles_m} * tiles_n, multiprocessors / c.blocks()));
  const int b_rows = c.columns * c.columns_together() / c.out_columns();
  const GemmArguments arguments{.order = TileOrder::of(tiles_m, tiles_n, pairs, c.rows_together(), b_rows),
                                .m = static_cast<int>(problem.m),
                                .n = static_cast<int>(problem.n),
                                .k = static_cast<int>(problem.k),
                                .epilogue = Epilogue::of(call)};
  const Launch how{.name = "tilewise wgmma gemm",
                   .blocks = pairs * c.blocks(),
                   .threads = c.threads(),
                   .shared_bytes = c.shared_bytes(),
                   .stream = stream,
                   .early = true};
  if constexpr (c.pair == Pair::none) {
    launch<gemm_kernel<T, Table, row>>(how, maps, arguments);
  } else {
    launch<gemm_pair_kernel<T, Table, row>>(how, maps, arguments);
  }
}

/// Calls body.operator()<Table>() with the table for a product of 16-bit results.
template <typename Body>
auto with_table(const GemmProblem& problem, const Body& body) {
  if (problem.gated) return body.template operator()<Gated>();
  if (problem.a_by_rows) {
    return problem.b_by_rows ? body.template operator()<Plain>() : body.template operator()<TransposedB>();
  }
  return problem.b_by_rows ? body.template operator()<TransposedA>()
                           : body.template operator()<TransposedBoth>();
}

template <typename T>
void run_wide(const GemmCall& call, int multiprocessors, cudaStream_t stream) {
  const GemmProblem& problem = call.problem;
  if (problem.gated) return run_row<T, WideGated, 0>(call, multiprocessors, stream);
  if (problem.a_by_rows) {
    return problem.b_by_rows ? run_row<T, Wide<false, false>, 0>(call, multiprocessors, stream)
                             : run_row<T, Wide<false, true>, 0>(call, multiprocessors, stream);
  }
  return problem.b_by_rows ? run_row<T, Wide<true, false>, 0>(call, multiprocessors, stream)
                           : run_row<T, Wide<true, true>, 0>(call, multiprocessors, stream);
}

/// Runs the chosen row. All rows of the tables are compiled.
template <typename T>
void run_chosen(const GemmCall& call, int chosen, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (call.problem.out_dtype == DType::f32) return run_wide<T>(call, multiprocessors, stream);
  with_table(call.problem, [&]<typename Table>() {
    with_row<Table>(chosen, [&](auto row) { run_row<T, Table, row>(call, multiprocessors, stream); });
  });
}

/// The row that suits a product.
inline int chosen_row(const GemmProblem& problem, int multiprocessors) {
  if (problem.out_dtype == DType::f32) return 0;
  return with_table(problem, [&]<typename Table>() { return choose_row<Table>(problem, multiprocessors); });
}

}  // namespace tilewise::cuda::gemm
