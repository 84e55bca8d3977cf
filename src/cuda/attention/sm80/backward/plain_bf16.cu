#include "cuda/attention/sm80/backward/backward.cuh"

namespace tilewise::cuda::mma {

template <>
void plain_backward_of<__nv_bfloat16>(const AttentionCall& call, const BackwardSpace& space,
                                      const Context& context, int row) {
  run_chosen_backward<__nv_bfloat16, PlainBackward>(call, space, context, row);
}

}  // namespace tilewise::cuda::mma
