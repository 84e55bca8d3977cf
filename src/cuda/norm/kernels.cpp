#include "core/reasons.h"
#include "cuda/norm/common/config.h"
#include "cuda/runtime/device.h"
#include "norm/kernel.h"

namespace tilewise::cuda {
namespace {

std::string supports(const NormProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
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
  if (problem.pass == Pass::forward) return "computes backward only";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return needs("f16 or bf16", to_string(problem.dtype));
  }
  if (problem.dim % 512 != 0 || problem.dim < 1024 || problem.dim > 8192) {
    return needs("rows of 1024 to 8192 elements in multiples of 512", problem.dim);
  }
  if (!problem.aligned) return "needs rows that start at multiples of 16 bytes, without negative strides";
  if (!problem.x_gradient) return "needs dx to be asked for";
  if (problem.rows == 0) return "needs at least one row";
  return reason_against_device(problem.device, [&](const DeviceProperties& device) -> std::string {
    if (device.compute_capability < 90) return "needs compute capability 9.0 or higher";
    return unsuited_shared_memory(problem.device, norm::ring_bytes(problem));
  });
}

// On an H200 this kernel took 0.93 to 0.96 of the time of `rows` for rows of 4096, 5120 and 8192 elements
// (docs/layer.md). Of shorter rows only 768 elements were measured, where `rows` was faster.
std::string ring_yields(const NormProblem& problem) {
  return problem.dim < 4096 ? "the kernel rows is faster for rows of fewer than 4096 elements" : "";
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
