#include "cuda/attention/sm90/forward/rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void few_forward_of<__half>(const AttentionCall& call, const Context& context, int row, const FewPlan& plan) {
  run_chosen<__half, FewForward>(call, context, row, plan);
}

}  // namespace tilewise::cuda::wgmma
