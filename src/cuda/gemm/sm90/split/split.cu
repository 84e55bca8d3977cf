#include "cuda/gemm/sm90/split/split.h"

#include "cuda/gemm/sm90/split/split_kernel.cuh"

namespace tilewise::cuda::gemm {

std::size_t split_workspace(const GemmCall& call, const Context&) {
  return SplitWorkspace(call, nullptr).bytes;
}

void run_split(const GemmCall& call, const Context& context) {
  call.problem.allow_tf32 ? run<true>(call, context) : run<false>(call, context);
}

}  // namespace tilewise::cuda::gemm
