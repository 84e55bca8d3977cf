#include "cuda/wgmma/forward_rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void general_forward_of<__nv_bfloat16>(const AttentionCall& call, const Context& context) {
  run_suited<__nv_bfloat16, GeneralForward>(call, context);
}

}  // namespace tilewise::cuda::wgmma
