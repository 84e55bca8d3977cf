#include "cuda/gemm/sm90/tiles/kernel.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void wgmma_of<__half>(const GemmCall& call, int row, const Context& context) {
  run_chosen<__half>(call, row, context);
}

}  // namespace tilewise::cuda::gemm
