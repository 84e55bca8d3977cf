#include "cuda/norm/common/config.h"
#include "cuda/norm/common/dispatch.cuh"
#include "cuda/norm/sm90/backward_ring.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/column_sums.h"

namespace tilewise::cuda::norm {
namespace {

int threads_of(const NormProblem& problem) {
  return static_cast<int>(problem.dim) * static_cast<int>(size_of(problem.dtype)) / 16 / late_chunks;
}

int blocks_of(const NormProblem& problem) {
  return blocks_that_stay(problem.rows, device_properties(problem.device.index).multiprocessors,
                          late_threads / threads_of(problem));
}

}  // namespace

std::size_t ring_bytes(const NormProblem& problem) {
  return asked_for(std::size_t{late_stages} * 2 * static_cast<std::size_t>(problem.dim) *
                   size_of(problem.dtype));
}

std::size_t ring_workspace(const NormCall& call, const Context&) {
  Arena arena(nullptr);
  take_partials(arena, call, blocks_of(call.problem));
  return arena.used();
}

void ring_backward(const NormCall& call, const Context& context) {
  const NormProblem& problem = call.problem;
  const int blocks = blocks_of(problem);
  Arena arena(context.workspace.data);
  const Partials partials = take_partials(arena, call, blocks);
  with_types(problem, [&]<typename T, Norm norm>() {
    if constexpr (sizeof(T) == 2) {
      const Launch how{.name = "tilewise norm backward, ring",
                       .blocks = blocks,
                       .threads = threads_of(problem),
                       .shared_bytes = ring_bytes(problem),
                       .stream = static_cast<cudaStream_t>(context.stream)};
      call.d_sum.data == nullptr ? launch<ring_kernel<T, norm, false>>(how, call, partials)
                                 : launch<ring_kernel<T, norm, true>>(how, call, partials);
    }
  });
  sum_partials({partials.weight, call.d_weight}, {partials.bias, call.d_bias}, blocks, problem.dim, context);
}

}  // namespace tilewise::cuda::norm
