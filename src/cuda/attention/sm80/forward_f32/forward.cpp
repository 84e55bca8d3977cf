#include "cuda/attention/sm80/forward_f32/forward.h"

#include "cuda/attention/simt/fused.h"

namespace tilewise::cuda::mma_f32 {
namespace {

ForwardSpace space_of(const AttentionCall& call, void* base) {
  return (call.allow_tf32 ? tf32_forward_space : full_forward_space)(call, base);
}

}  // namespace

std::size_t forward_workspace(const AttentionCall& call) { return space_of(call, nullptr).bytes; }

void forward(const AttentionCall& call, const Context& context) {
  const ForwardSpace space = space_of(call, context.workspace.data);
  (call.allow_tf32 ? tf32_forward : full_forward)(call, space, context);
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::mma_f32
