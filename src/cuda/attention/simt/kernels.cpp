#include "attention/kernel.h"
#include "cuda/attention/common/backward/ordered_starts.h"
#include "cuda/attention/simt/dense.h"
#include "cuda/attention/simt/fused.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string supports_fused(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.layout == Layout::paged && problem.pass == Pass::backward) return "paged keys have no backward";
  return {};
}

std::string supports_dense(const AttentionProblem& problem) {
  if (const std::string reason = supports_fused(problem); !reason.empty()) return reason;
  if (problem.batch_invariant) return "does not support batch_invariant";
  if (const std::string reason = unsuited_piece(problem); !reason.empty()) return reason;
  if (problem.layout != Layout::dense) return "supports dense tensors only, not packed or paged ones";
  if (problem.features.logit_scale) return "does not support a logit scale";
  return problem.features.block_mask ? "does not support block masks" : "";
}

// Makes the call's device current around one of the two passes.
template <auto forward, auto backward>
void launch_on_device(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  if (call.problem.pass == Pass::forward) return forward(call, context);
  Context remaining = context;
  backward(simt::with_ordered_starts(call, remaining), remaining);
}

std::size_t fused_workspace(const AttentionCall& call, const Context&) {
  if (call.problem.pass == Pass::forward) return 0;
  return simt::ordered_starts_bytes(call) + simt::fused_backward_workspace(call);
}

std::size_t dense_workspace(const AttentionCall& call, const Context&) {
  return call.problem.pass == Pass::forward ? simt::dense_forward_workspace(call)
                                            : simt::dense_backward_workspace(call);
}

}  // namespace

constinit const AttentionKernel fused_attention = {
    .name = "fused",
    .supports = supports_fused,
    .workspace = fused_workspace,
    .launch = launch_on_device<simt::fused_forward, simt::fused_backward>};

constinit const AttentionKernel tiled_attention = {
    .name = "tiled",
    .supports = supports_dense,
    .workspace = dense_workspace,
    .launch = launch_on_device<simt::tiled_forward, simt::tiled_backward>};

constinit const AttentionKernel naive_attention = {
    .name = "naive",
    .supports = supports_dense,
    .workspace = dense_workspace,
    .launch = launch_on_device<simt::naive_forward, simt::naive_backward>};

}  // namespace tilewise::cuda
