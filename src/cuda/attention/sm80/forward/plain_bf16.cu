#include "cuda/attention/sm80/forward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void plain_forward_of<__nv_bfloat16>(const AttentionCall& call, const Context& context, int row) {
  run_chosen<__nv_bfloat16, PlainForward>(call, context, row);
}

}  // namespace tilewise::cuda::mma
