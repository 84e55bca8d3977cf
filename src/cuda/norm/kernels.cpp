#include "cuda/norm/config.h"
#include "cuda/runtime/device.h"
#include "norm/kernel.h"

namespace tilewise::cuda {
namespace {

std::string supports(const NormProblem& problem) {
  if (problem.device.type != Device::Type::cuda) return "runs on CUDA devices alone";
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

}  // namespace

constinit const NormKernel rows_norm = {
    .name = "rows", .supports = supports, .workspace = workspace, .launch = launch_on_device};

}  // namespace tilewise::cuda
