#include "cuda/rope/simt/rope.h"
#include "cuda/runtime/device.h"
#include "rope/kernel.h"

namespace tilewise::cuda {
namespace {

std::string supports(const RopeProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  return {};
}

std::size_t workspace(const RopeCall&, const Context&) { return 0; }

void launch_on_device(const RopeCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  run_rope(call, context);
}

}  // namespace

constinit const RopeKernel rows_rope = {
    .name = "rows", .supports = supports, .workspace = workspace, .launch = launch_on_device};

}  // namespace tilewise::cuda
