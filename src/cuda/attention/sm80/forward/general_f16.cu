#include "cuda/attention/sm80/forward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void general_forward_of<__half>(const AttentionCall& call, const Context& context, int row) {
  run_chosen<__half, GeneralForward>(call, context, row);
}

}  // namespace tilewise::cuda::mma
