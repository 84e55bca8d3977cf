#include "cuda/attention/sm90/forward/rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void combined_forward_of<__half>(const AttentionCall& call, const Context& context, int row) {
  run_chosen<__half, CombinedForward>(call, context, row);
}

}  // namespace tilewise::cuda::wgmma
