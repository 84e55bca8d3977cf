#include "cuda/gemm/cublaslt.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/device.h"
#include "gemm/kernel.h"

namespace tilewise::cuda {
namespace {

std::string supports(const GemmProblem& problem) {
  if (problem.device.type != Device::Type::cuda) return "runs on CUDA devices alone";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16, not " + std::string(to_string(problem.dtype));
  }
  if (problem.out_dtype != problem.dtype) return "sums up in tensor cores, which f32 is too precise for";
  if (problem.gated || problem.activation != Activation::none) return "makes plain products alone";
  if (problem.k == 0) return "takes no less than one summand";
  if (problem.residual && problem.accumulate) return "adds a residual or accumulates, not both";
  if (!problem.as_blas) return "takes rows that do not overlap and a bias in the type of a alone";
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (problem.m > most || problem.n > most || problem.k > most) return "takes dimensions to 2^30";
  try {
    if (device_properties(problem.device.index).compute_capability < 80) return "needs compute capability 8.0";
  } catch (const DeviceError& error) {
    return error.what();
  }
  std::string reason;
  find_cublaslt(&reason);
  return reason;
}

std::string yields(const GemmProblem& problem) {
  return wgmma_gemm.supports(problem).empty() ? "leaves it to wgmma" : "";
}

void launch_on_device(const GemmCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  gemm::run_cublaslt(call, context);
}

}  // namespace

constinit const GemmKernel cublaslt_gemm = {.name = "cublaslt",
                                            .supports = supports,
                                            .workspace = gemm::cublaslt_workspace,
                                            .launch = launch_on_device,
                                            .yields = yields};

}  // namespace tilewise::cuda
