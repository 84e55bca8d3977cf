#include "cuda/wgmma/forward_rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void forward_of<__half>(const AttentionCall& call, const Context& context) {
  run_suited<__half, Forward>(call, context);
}

}  // namespace tilewise::cuda::wgmma
