#include "cuda/wgmma/forward_rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void general_forward_of<__half>(const AttentionCall& call, const Context& context) {
  run_suited<__half, GeneralForward>(call, context);
}

}  // namespace tilewise::cuda::wgmma
