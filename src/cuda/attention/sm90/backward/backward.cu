#include "cuda/attention/sm90/backward/backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/sm90/backward/backward.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_backward {
namespace {

int row_of(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  return first_row<Backward>([&](const Config& c) { return c.dim >= dim; });
}

BackwardSpace space_of(const AttentionCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  return {call, context.workspace.data, mma::shares_of(call, rows[row_of(call)].cut(), multiprocessors)};
}

template <typename T, int row>
void run_row(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  constexpr Config c = rows[row];
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto blocks = BackwardBlocks::of(call, c.cut(), multiprocessors);
  launch<backward_kernel<T, row>>({.name = "tilewise wgmma backward",
                                   .blocks = blocks.count() * space.shares.count,
                                   .threads = c.threads(),
                                   .shared_bytes = c.shared_bytes(),
                                   .stream = static_cast<cudaStream_t>(context.stream),
                                   .early = true},
                                  call, blocks, space);
}

template <typename T>
void run(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  with_row<Backward>(row_of(call), [&](auto row) { run_row<T, row>(call, space, context); });
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call, const Context& context) {
  return space_of(call, context).bytes;
}

void backward(const AttentionCall& call, const Context& context) {
  const BackwardSpace space = space_of(call, context);
  mma::prepare_backward(call, space, context);
  call.problem.dtype == DType::f16 ? run<__half>(call, space, context)
                                   : run<__nv_bfloat16>(call, space, context);
  mma::finish_backward(call, space, context);
}

}  // namespace tilewise::cuda::wgmma_backward
