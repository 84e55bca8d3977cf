#include <algorithm>

#include "attention/kernel.h"
#include "cuda/attention/common/f32/limits.h"
#include "cuda/attention/widened/widened.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

// f16 and bf16 in strict precision: the f32 kernels run on f32 copies of the tensors. Backward computes O and
// LSE again, since those of the caller were rounded to 16 bits or come from P that was.

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (!problem.strict) return "is for f16 and bf16 in strict precision only";
  if (problem.batch_invariant) return mma_f32::depends_on_batch;
  if (const std::string reason = unsuited_piece(problem); !reason.empty()) return reason;
  // Without tensor cores, copies would gain nothing over the fused kernel, which widens as it reads.
  const std::string reason = mma_attention.supports(widened::problem_in_f32(problem, problem.pass));
  return reason.empty() ? "" : "computes in f32 with mma: " + reason;
}

std::string yields(const AttentionProblem& problem) {
  return mma_attention.yields(widened::problem_in_f32(problem, problem.pass));
}

bool is_backward(const AttentionCall& call) { return call.problem.pass == Pass::backward; }

const AttentionKernel& forward_kernel(const widened::Copies& copies) {
  return choose_attention_kernel(copies.forward.problem, "auto");
}

std::size_t workspace(const AttentionCall& call, const Context& context) {
  const widened::Copies copies(call, nullptr);
  const std::size_t forward =
      configure_kernel(forward_kernel(copies), copies.forward, context).workspace_bytes;
  const std::size_t backward =
      is_backward(call) ? configure_kernel(mma_attention, copies.backward, context).workspace_bytes : 0;
  return copies.bytes + std::max(forward, backward);
}

void launch(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  const widened::Copies copies(call, context.workspace.data);
  Context rest = context;
  rest.workspace.data = static_cast<std::byte*>(context.workspace.data) + copies.bytes;
  rest.workspace.bytes -= copies.bytes;
  widened::widen_inputs(call, copies, context);
  launch_inner(forward_kernel(copies), copies.forward, rest);
  if (is_backward(call)) launch_inner(mma_attention, copies.backward, rest);
  widened::round_results(call, copies, context);
}

}  // namespace

constinit const AttentionKernel widened_attention = {
    .name = "widened", .supports = supports, .workspace = workspace, .launch = launch, .yields = yields};

}  // namespace tilewise::cuda
