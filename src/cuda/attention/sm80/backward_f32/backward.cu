#include "cuda/attention/sm80/backward_f32/backward.h"

#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm80/backward_f32/backward.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

/// The offset of the fused kernel's workspace, which follows this kernel's.
std::size_t fused_offset(const AttentionCall& call) {
  constexpr std::size_t alignment = 64;
  return (backward_space_of(call, nullptr).bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Configuration configure_backward(const AttentionCall& call, const Context& context) {
  const std::size_t fused = simt::fused_backward_workspace(call);
  // For dK and dV without dQ, or dQ alone, the fused kernel needs fewer products.
  if (!simt::takes_some_heads(call)) return {.workspace_bytes = fused};
  const std::size_t shared_bytes = device_properties(context.device.index).shared_bytes;
  return {.workspace_bytes = fused_offset(call) + fused,
          .row = choose_backward_row<FullBackward>(call, shared_bytes)};
}

std::size_t backward_shared_bytes(std::int64_t dim) {
  std::size_t least = 0;
  for (const BackwardConfig& c : FullBackward::rows) {
    if (c.dim >= dim && (least == 0 || c.shared_bytes() < least)) least = c.shared_bytes();
  }
  return std::max(least, simt::some_heads_shared_bytes(dim));
}

void backward(const AttentionCall& call, int row, const Context& context) {
  if (row < 0) return simt::fused_backward(call, context);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const BackwardSpace space = backward_space_of(call, context.workspace.data);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  run_chosen_backward<FullBackward>(call, space, row, multiprocessors, stream);
  simt::mend_peaks(call, space.peaks, {}, stream);
  Context remaining = context;
  remaining.workspace.data = static_cast<std::byte*>(context.workspace.data) + fused_offset(call);
  simt::fused_backward_of(call, unfit_of(space), remaining);
}

}  // namespace tilewise::cuda::mma_f32
