#include "cuda/attention/sm80/forward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void plain_forward_of<__half>(const AttentionCall& call, const Context& context) {
  run_suited<__half, PlainForward>(call, context);
}

}  // namespace tilewise::cuda::mma
