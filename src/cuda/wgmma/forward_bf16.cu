#include "cuda/wgmma/forward_rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void forward_of<__nv_bfloat16>(const AttentionCall& call, const Context& context) {
  run_suited<__nv_bfloat16, Forward>(call, context);
}

}  // namespace tilewise::cuda::wgmma
