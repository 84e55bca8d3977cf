#include "cuda/gemm/sm90/tiles/rows.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void wgmma_of<__half>(const GemmCall& call, const Context& context) {
  run_by_layout<__half>(call, context);
}

}  // namespace tilewise::cuda::gemm
