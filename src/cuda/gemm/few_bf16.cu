#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void few_of<__nv_bfloat16>(const GemmCall& call, const Context& context, bool early) {
  run_few<__nv_bfloat16>(call, context, early);
}

std::size_t few_workspace(const GemmCall& call, const Context& context) {
  Arena arena(nullptr);
  take_few_space(arena, call.problem.m, device_properties(context.device.index).multiprocessors);
  return arena.used();
}

}  // namespace tilewise::cuda::gemm
