#include "cuda/attention/sm90/backward/backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/sm90/backward/backward.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::wgmma_backward {
namespace {

int row_of(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  int row = 0;
  while (rows[row].dim < dim) ++row;
  return row;
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
  const int chosen = row_of(call);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<T, row>(call, space, context) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(rows))>{});
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
