#include "cuda/attention/sm80/forward_f32/rows.cuh"

namespace tilewise::cuda::mma_f32 {

ForwardSpace tf32_forward_space(const AttentionCall& call, void* base) {
  return space_of<Tf32Forward>(call, base);
}
void tf32_forward(const AttentionCall& call, const ForwardSpace& space, const Context& context) {
  run_suited<Tf32Forward>(call, space, context);
}

}  // namespace tilewise::cuda::mma_f32
