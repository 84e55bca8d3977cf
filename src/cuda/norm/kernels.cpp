#include "cuda/norm/common/config.h"
#include "cuda/runtime/device.h"
#include "norm/kernel.h"

namespace tilewise::cuda {
namespace {

std::string supports(const NormProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "takes f32, f16 and bf16, not f64";
  return {};
}

std::size_t workspace(const NormCall& call, const Context& context) {
  return call.problem.pass == Pass::forward ? 0 : norm::backward_workspace(call, context);
}

void launch_on_device(const NormCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  if (call.problem.dim == 0) return;
  if (call.problem.pass == Pass::forward) {
    norm::forward(call, context);
  } else {
    norm::backward(call, context);
  }
}

// Backward of long rows (backward_ring.cu).
std::string ring_supports(const NormProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.pass == Pass::forward) return "is for backward alone";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16, not " + std::string(to_string(problem.dtype));
  }
  if (problem.dim % 512 != 0 || problem.dim < 1024 || problem.dim > 8192) {
    return "takes rows of 1024 to 8192 elements, in multiples of 512";
  }
  if (!problem.aligned) return "takes rows that begin at multiples of 16 bytes";
  if (!problem.x_gradient) return "is no gain without dx";
  if (problem.rows == 0) return "takes one row or more";
  return reason_against_device(problem.device, [&](const DeviceProperties& device) {
    if (device.compute_capability < 90) return "needs compute capability 9.0";
    return norm::ring_bytes(problem) > device.shared_bytes ? "needs more shared memory for such rows" : "";
  });
}

// On an H200 this kernel took 0.93 to 0.96 of the time of `rows` for rows of 4096, 5120 and 8192 elements
// (docs/layer.md). Of shorter rows only 768 elements were measured, where `rows` was faster.
std::string ring_yields(const NormProblem& problem) {
  return problem.dim < 4096 ? "leaves rows of less than 4096 elements to rows" : "";
}

void launch_ring(const NormCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  norm::ring_backward(call, context);
}

}  // namespace

constinit const NormKernel ring_norm = {.name = "ring",
                                        .supports = ring_supports,
                                        .workspace = norm::ring_workspace,
                                        .launch = launch_ring,
                                        .yields = ring_yields};
constinit const NormKernel rows_norm = {
    .name = "rows", .supports = supports, .workspace = workspace, .launch = launch_on_device};

}  // namespace tilewise::cuda
