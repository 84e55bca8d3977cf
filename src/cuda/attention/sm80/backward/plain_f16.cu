#include "cuda/attention/sm80/backward/backward.cuh"

namespace tilewise::cuda::mma {

template <>
void plain_backward_of<__half>(const AttentionCall& call, const BackwardSpace& space, const Context& context,
                               int row) {
  run_chosen_backward<__half, PlainBackward>(call, space, context, row);
}

}  // namespace tilewise::cuda::mma
