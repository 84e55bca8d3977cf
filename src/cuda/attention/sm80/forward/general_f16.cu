#include "cuda/attention/sm80/forward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void general_forward_of<__half>(const AttentionCall& call, const Context& context) {
  run_suited<__half, GeneralForward>(call, context);
}

}  // namespace tilewise::cuda::mma
