#include "cuda/attention/sm80/forward_f32/forward.cuh"

namespace tilewise::cuda::mma_f32 {

Configuration configure_tf32_forward(const AttentionCall& call, const Context& context) {
  return configuration_of<Tf32Forward>(call, context);
}
ForwardSpace tf32_forward(const AttentionCall& call, int row, const Context& context) {
  return run_chosen<Tf32Forward>(call, row, context);
}

}  // namespace tilewise::cuda::mma_f32
