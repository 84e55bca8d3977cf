#include "cuda/gemm/sm90/split/split.h"
#include "cuda/gemm/sm90/split/split_kernel.cuh"

namespace tilewise::cuda::gemm {

std::size_t split_items_workspace(const GemmCall& call, const Items& items) {
  return SplitWorkspace(call, nullptr, items.count).bytes;
}

void run_split_items(const GemmCall& call, const Items& items, const Context& context) {
  run<false, true>(call, items, context);
}

}  // namespace tilewise::cuda::gemm
