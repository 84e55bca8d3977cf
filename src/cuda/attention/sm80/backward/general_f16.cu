#include "cuda/attention/sm80/backward/rows.cuh"

namespace tilewise::cuda::mma {

template <>
void general_backward_of<__half>(const AttentionCall& call, const BackwardSpace& space,
                                 const Context& context) {
  run_suited_backward<__half, GeneralBackward>(call, space, context);
}

}  // namespace tilewise::cuda::mma
