#include "cuda/attention/sm90/forward/rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void combined_forward_of<__nv_bfloat16>(const AttentionCall& call, const Context& context, int row) {
  run_chosen<__nv_bfloat16, CombinedForward>(call, context, row);
}

}  // namespace tilewise::cuda::wgmma
