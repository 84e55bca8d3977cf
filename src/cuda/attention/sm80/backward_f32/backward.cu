#include "cuda/attention/sm80/backward_f32/backward.h"

#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm80/backward_f32/rows.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

/// The fused kernel's workspace, behind ours.
std::size_t fused_offset(const AttentionCall& call) {
  constexpr std::size_t alignment = 64;
  return (backward_space_of(call, nullptr).bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call) {
  const std::size_t fused = simt::fused_backward_workspace(call);
  return simt::takes_some_heads(call) ? fused_offset(call) + fused : fused;
}

std::size_t backward_shared_bytes(std::int64_t dim) {
  std::size_t least = 0;
  for (const BackwardConfig& c : FullBackward::rows) {
    if (c.dim >= dim && (least == 0 || c.shared_bytes() < least)) least = c.shared_bytes();
  }
  return std::max(least, simt::some_heads_shared_bytes(dim));
}

void backward(const AttentionCall& call, const Context& context) {
  // Without dq, or for dq alone, the fused kernel needs fewer products.
  if (!simt::takes_some_heads(call)) return simt::fused_backward(call, context);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const BackwardSpace space = backward_space_of(call, context.workspace.data);
  const DeviceProperties& device = device_properties(context.device.index);
  run_suited_backward<FullBackward>(call, space, choose_backward_row<FullBackward>(call, device.shared_bytes),
                                    device.multiprocessors, stream);
  simt::mend_peaks(call, space.peaks, {}, stream);
  Context rest = context;
  rest.workspace.data = static_cast<std::byte*>(context.workspace.data) + fused_offset(call);
  simt::fused_backward_of(call, unfit_of(space), rest);
}

}  // namespace tilewise::cuda::mma_f32
