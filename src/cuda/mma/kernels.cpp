#include "attention/kernel.h"
#include "cuda/mma/forward.h"
#include "cuda/mma/tuning.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string supports(const AttentionProblem& problem) {
  if (problem.device.type != Device::Type::cuda) return "runs on CUDA devices alone";
  if (problem.pass == Pass::backward) return "has no backward";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16, not " + std::string(to_string(problem.dtype));
  }
  if (problem.dim_qk > mma::most_dim || problem.dim_v > mma::most_dim) {
    return "takes head dims to " + std::to_string(mma::most_dim);
  }
  constexpr std::int64_t most_length = 0x7fffffff - 256;  // positions, tiles past the end too, fit 32 bits
  if (problem.length_q > most_length || problem.length_k > most_length) {
    return "takes sequences to 2^31 - 257";
  }
  try {
    if (device_properties(problem.device.index).compute_capability < 80) {
      return "needs compute capability 8.0";
    }
  } catch (const DeviceError& error) {
    return error.what();
  }
  return {};
}

std::size_t workspace(const AttentionCall&, const Context&) { return 0; }

void launch_on_device(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  mma::forward(call, context);
}

}  // namespace

constinit const AttentionKernel mma_attention = {
    .name = "mma", .supports = supports, .workspace = workspace, .launch = launch_on_device};

}  // namespace tilewise::cuda
