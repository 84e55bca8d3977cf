#include "cuda/attention/sm80/forward_f32/forward.h"

#include "cuda/attention/simt/fused.h"

namespace tilewise::cuda::mma_f32 {

Configuration configure_forward(const AttentionCall& call, const Context& context) {
  return (call.allow_tf32 ? configure_tf32_forward : configure_full_forward)(call, context);
}

void forward(const AttentionCall& call, int row, const Context& context) {
  const ForwardSpace space = (call.allow_tf32 ? tf32_forward : full_forward)(call, row, context);
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::mma_f32
