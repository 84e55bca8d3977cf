#include "cuda/wgmma/forward_rows.cuh"

namespace tilewise::cuda::wgmma {

template <>
void few_forward_of<__half>(const AttentionCall& call, const Context& context, const FewPlan& plan) {
  run_suited<__half, FewForward>(call, context, plan);
}

}  // namespace tilewise::cuda::wgmma
