#include "cuda/attention/sm80/backward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void general_backward_of<__nv_bfloat16>(const AttentionCall& call, const BackwardSpace& space,
                                        const Context& context) {
  run_suited_backward<__nv_bfloat16, GeneralBackward>(call, space, context);
}

}  // namespace tilewise::cuda::mma
