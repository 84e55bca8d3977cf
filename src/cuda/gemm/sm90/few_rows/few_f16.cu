#include "cuda/gemm/sm90/few_rows/few_rows.cuh"
#include "cuda/gemm/sm90/wgmma.h"

namespace tilewise::cuda::gemm {

template <>
void few_of<__half>(const GemmCall& call, const Context& context, InChain place) {
  run_few<__half>(call, context, place);
}

}  // namespace tilewise::cuda::gemm
