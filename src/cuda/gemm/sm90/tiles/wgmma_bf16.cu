#include "cuda/gemm/sm90/tiles/rows.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void wgmma_of<__nv_bfloat16>(const GemmCall& call, const Context& context) {
  run_by_layout<__nv_bfloat16>(call, context);
}

}  // namespace tilewise::cuda::gemm
