#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void few_of<__half>(const GemmCall& call, const Context& context, bool early) {
  run_few<__half>(call, context, early);
}

}  // namespace tilewise::cuda::gemm
