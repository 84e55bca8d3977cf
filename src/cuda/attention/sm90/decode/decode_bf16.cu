#include "cuda/attention/sm90/forward/rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void decode_forward_of<__nv_bfloat16>(const AttentionCall& call, const Context& context, int row,
                                      const DecodePlan& plan) {
  run_chosen<__nv_bfloat16, DecodeForward>(call, context, row, plan);
}

}  // namespace tilewise::cuda::wgmma
