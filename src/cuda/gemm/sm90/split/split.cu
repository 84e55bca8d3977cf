#include "cuda/gemm/sm90/split/split.h"

#include "cuda/gemm/simt/simt.h"
#include "cuda/gemm/sm90/split/split_kernel.cuh"
#include "cuda/gemm/sm90/split/split_pass.cuh"
#include "cuda/gemm/sm90/tiles/kernel.cuh"

namespace tilewise::cuda::gemm {
namespace {

/// The factors for which `suits`; `blocks_of` says how many blocks one takes.
template <typename Suits, typename Blocks>
Splitting splitting_of(const GemmCall& call, const SplitSpace& space, const Suits& suits,
                       const Blocks& blocks_of) {
  Splitting splitting;
  const auto add = [&](const Matrix& matrix, const Parts& parts, Spread* spread, int* marks) {
    if (suits(matrix)) splitting.add(matrix, parts, spread, marks, blocks_of(matrix));
  };
  add(call.a, space.a, &space.findings->a, space.row_marks);
  add(call.b, space.b, &space.findings->b, space.column_marks);
  if (call.problem.gated) add(call.gate, space.gate, &space.findings->b, space.column_marks);
  return splitting;
}

template <int parts>
void split_into_f16(const GemmCall& call, const SplitSpace& space, cudaStream_t stream) {
  const Splitting rows = splitting_of(
      call, space, [](const Matrix& x) { return x.by_rows(); }, [](const Matrix& x) { return x.rows; });
  const Splitting columns = splitting_of(
      call, space, [](const Matrix& x) { return !x.by_rows(); },
      [](const Matrix& x) { return (x.rows + across_rows - 1) / across_rows; });
  const auto how = [&](const Splitting& splitting, int threads) {
    return Launch{.name = "tilewise splitting into f16",
                  .blocks = splitting.blocks,
                  .threads = threads,
                  .stream = stream};
  };
  call.problem.k <= 2 * 8 * split_threads ? launch<split_by_rows<parts, 2>>(how(rows, split_threads), rows)
                                          : launch<split_by_rows<parts, 6>>(how(rows, split_threads), rows);
  launch<split_by_columns<parts>>(how(columns, across_threads), columns);
}

template <typename Table, int row>
void multiply(const GemmCall& call, const SplitSpace& space, int multiprocessors, cudaStream_t stream) {
  constexpr SplitConfig c = Table::rows[row];
  const GemmProblem& problem = call.problem;
  const int b_box = c.gated ? c.columns / 2 : c.columns;
  GemmMaps maps{.a = map_of_factor(space.a.matrix(call.a), false, c.rows()),
                .b = map_of_factor(space.b.matrix(call.b), false, b_box)};
  maps.gate = c.gated ? map_of_factor(space.gate.matrix(call.gate), false, b_box) : maps.b;
  maps.out = maps.out_rest = maps.b;  // results in f32 do without
  const int tiles_m = tiles_of(problem.m, c.rows());
  const int tiles_n = tiles_of(problem.n, c.output().out_columns());
  const int blocks =
      static_cast<int>(std::min<std::int64_t>(std::int64_t{tiles_m} * tiles_n, multiprocessors));
  const GemmArguments arguments{.order = TileOrder::of(tiles_m, tiles_n, blocks, c.rows(), c.columns),
                                .m = static_cast<int>(problem.m),
                                .n = static_cast<int>(problem.n),
                                .k = static_cast<int>(problem.k),
                                .epilogue = Epilogue::of(call)};
  launch<split_gemm_kernel<Table, row>>({.name = "tilewise split gemm",
                                         .blocks = blocks,
                                         .threads = c.output().threads(),
                                         .shared_bytes = c.shared_bytes(),
                                         .stream = stream},
                                        maps, arguments, space);
}

template <bool tf32>
void run(const GemmCall& call, const Context& context) {
  const SplitSpace space(call, context.workspace.data);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* stream = static_cast<cudaStream_t>(context.stream);
  check_cuda(cudaMemsetAsync(space.findings, 0, space.zeroed, stream), "tilewise split gemm");
  split_into_f16<(tf32 ? 1 : 2)>(call, space, stream);
  const Splitting squares = splitting_of(
      call, space, [](const Matrix&) { return true; },
      [](const Matrix& x) { return (x.rows + 31) / 32 * ((x.columns + 31) / 32); });
  launch<split_into_bf16<tf32>>({.name = "tilewise splitting into bf16",
                                 .blocks = std::min<std::int64_t>(squares.blocks, 8 * multiprocessors),
                                 .threads = split_threads,
                                 .stream = stream},
                                squares, space.findings);
  call.problem.gated ? multiply<Split<tf32, true>, 0>(call, space, multiprocessors, stream)
                     : multiply<Split<tf32, false>, 0>(call, space, multiprocessors, stream);
  run_simt_marked(call, {space.row_marks, space.column_marks}, context);
}

}  // namespace

std::size_t split_workspace(const GemmCall& call, const Context&) { return SplitSpace(call, nullptr).bytes; }

void run_split(const GemmCall& call, const Context& context) {
  call.problem.allow_tf32 ? run<true>(call, context) : run<false>(call, context);
}

}  // namespace tilewise::cuda::gemm
