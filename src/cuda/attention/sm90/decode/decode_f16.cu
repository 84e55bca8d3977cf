#include "cuda/attention/sm90/forward/rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void decode_forward_of<__half>(const AttentionCall& call, const Context& context, int row,
                               const DecodePlan& plan) {
  run_chosen<__half, DecodeForward>(call, context, row, plan);
}

}  // namespace tilewise::cuda::wgmma
