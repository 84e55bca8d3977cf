#include "cuda/gemm/sm90/tiles/kernel.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void wgmma_of<__nv_bfloat16>(const GemmCall& call, int row, const Context& context) {
  run_chosen<__nv_bfloat16>(call, row, context);
}

int wgmma_row(const GemmCall& call, const Context& context) {
  return chosen_row(call.problem, device_properties(context.device.index).multiprocessors);
}

}  // namespace tilewise::cuda::gemm
