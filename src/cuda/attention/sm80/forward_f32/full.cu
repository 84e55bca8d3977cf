#include "cuda/attention/sm80/forward_f32/forward.cuh"

namespace tilewise::cuda::mma_f32 {

Configuration configure_full_forward(const AttentionCall& call, const Context& context) {
  return configuration_of<FullForward>(call, context);
}
ForwardSpace full_forward(const AttentionCall& call, int row, const Context& context) {
  return run_chosen<FullForward>(call, row, context);
}

}  // namespace tilewise::cuda::mma_f32
