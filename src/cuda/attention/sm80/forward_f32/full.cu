#include "cuda/attention/sm80/forward_f32/rows.cuh"

namespace tilewise::cuda::mma_f32 {

ForwardSpace full_forward_space(const AttentionCall& call, void* base) {
  return space_of<FullForward>(call, base);
}
void full_forward(const AttentionCall& call, const ForwardSpace& space, const Context& context) {
  run_suited<FullForward>(call, space, context);
}

}  // namespace tilewise::cuda::mma_f32
