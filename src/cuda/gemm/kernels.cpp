#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/reasons.h"
#include "cuda/gemm/simt/simt.h"
#include "cuda/gemm/sm80/mma.h"
#include "cuda/gemm/sm90/few_rows/few_tuning.h"
#include "cuda/gemm/sm90/few_rows/stream_tuning.h"
#include "cuda/gemm/sm90/split/split.h"
#include "cuda/gemm/sm90/wgmma.h"
#include "cuda/runtime/device.h"
#include "gemm/kernel.h"

namespace tilewise::cuda {
namespace {

// Why none of the kernels for Hopper can run a problem; empty if one may.
std::string unsuited_for_hopper(const GemmProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
#ifndef TILEWISE_HAS_WGMMA
  return "this build has no code for sm_90a";
#endif
  if (problem.k == 0) return "needs K >= 1";
  if (!problem.aligned) return "needs rows that start at multiples of 16 bytes, without negative strides";
  if (problem.residual && problem.accumulate) return "does not support a residual together with accumulate";
  constexpr std::int64_t most = std::int64_t{1} << 30;
  const std::int64_t extent = std::max({problem.m, problem.n, problem.k});
  if (extent > most) return supports_up_to("M, N and K", most, extent);
  return reason_against_device(problem.device, [](const DeviceProperties& device) {
    return device.compute_capability != 90 ? "needs compute capability 9.0 (Hopper)" : "";
  });
}

std::string unsuited_for_halves(const GemmProblem& problem) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return needs("f16 or bf16", to_string(problem.dtype));
  }
  if (problem.gated && !(problem.a_by_rows && problem.b_by_rows)) {
    return "needs row-major matrices with a gate";
  }
  return unsuited_for_hopper(problem);
}

std::string supports_wgmma(const GemmProblem& problem) {
  if (const std::string reason = unsuited_for_halves(problem); !reason.empty()) return reason;
  if (problem.out_dtype != DType::f32 && problem.n % 8 != 0) {
    return needs("N in multiples of 8 for 16-bit results", problem.n);
  }
  if ((problem.m / 128 + 1) * (problem.n / 64 + 1) > 0x7fffffff) return "supports fewer than 2^31 tiles";
  return {};
}

std::string supports_few_rows(const GemmProblem& problem) {
  if (problem.m > gemm::most_tokens) return supports_up_to("M", gemm::most_tokens, problem.m);
  if (!problem.a_by_rows || !problem.b_by_rows) return "needs row-major matrices";
  if (problem.out_dtype != problem.dtype)
    return "accumulates in tensor cores, which is too inexact for f32 results";
  if ((problem.n / 64 + 1) * (problem.k / 64 + 1) > 0x7fffffff) return "supports fewer than 2^31 tiles";
  return unsuited_for_halves(problem);
}

// Measured on an H200 (docs/gemm.md): with two rows or more and a plain epilogue, cuBLASLt reads large
// weights faster.
std::string few_rows_yields(const GemmProblem& problem) {
  if (problem.m == 1 && problem.k % 8 == 0 && problem.k <= gemm::Streams::most_k()) return {};
  constexpr std::int64_t large = std::int64_t{4096} * 4096;
  if (problem.gated || problem.activation != Activation::none || problem.n * problem.k < large) return {};
  if (!cublaslt_gemm.supports(problem).empty() || !cublaslt_gemm.yields(problem).empty()) return {};
  return "cublaslt is faster for large weights (N * K >= 2^24) without a gate or an activation";
}

std::string supports_split(const GemmProblem& problem) {
  if (problem.dtype != DType::f32) return needs("f32", to_string(problem.dtype));
  if (problem.m < 128 || problem.n < 128 || problem.k < 64) {
    return "needs M >= 128, N >= 128 and K >= 64";
  }
  if ((problem.m / 128 + 1) * (problem.n / 64 + 1) > 0x7fffffff) return "supports fewer than 2^31 tiles";
  return unsuited_for_hopper(problem);
}

std::string supports_mma(const GemmProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return needs("f16 or bf16", to_string(problem.dtype));
  }
  if (problem.k == 0) return "needs K >= 1";
  if ((problem.m / 128 + 1) * (problem.n / 64 + 1) > 0x7fffffff) return "supports fewer than 2^31 tiles";
  return reason_against_device(problem.device, [](const DeviceProperties& device) {
    return device.compute_capability < 80 ? "needs compute capability 8.0 or higher" : "";
  });
}

std::string supports_simt(const GemmProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  return {};
}

std::size_t no_workspace(const GemmCall&, const Context&) { return 0; }

Configuration configure_wgmma([[maybe_unused]] const GemmCall& call,
                              [[maybe_unused]] const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return {};
#ifdef TILEWISE_HAS_WGMMA
  return {.row = gemm::wgmma_row(call, context)};
#else
  return {};
#endif
}

void launch_wgmma([[maybe_unused]] const GemmCall& call, [[maybe_unused]] const Configuration& configuration,
                  [[maybe_unused]] const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return;
#ifdef TILEWISE_HAS_WGMMA
  const DeviceGuard guard(context.device.index);
  call.problem.dtype == DType::f16 ? gemm::wgmma_of<__half>(call, configuration.row, context)
                                   : gemm::wgmma_of<__nv_bfloat16>(call, configuration.row, context);
#endif
}

void launch_few_rows([[maybe_unused]] const GemmCall& call, [[maybe_unused]] const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return;
#ifdef TILEWISE_HAS_WGMMA
  const DeviceGuard guard(context.device.index);
  call.problem.dtype == DType::f16 ? gemm::few_of<__half>(call, context, gemm::InChain::first)
                                   : gemm::few_of<__nv_bfloat16>(call, context, gemm::InChain::first);
#endif
}

std::size_t few_workspace([[maybe_unused]] const GemmCall& call, [[maybe_unused]] const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  return gemm::few_workspace(call, context);
#else
  return 0;
#endif
}

void launch_split([[maybe_unused]] const GemmCall& call, [[maybe_unused]] const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  const DeviceGuard guard(context.device.index);
  gemm::run_split(call, context);
#endif
}

std::size_t split_workspace([[maybe_unused]] const GemmCall& call, [[maybe_unused]] const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  return gemm::split_workspace(call, context);
#else
  return 0;
#endif
}

void launch_mma(const GemmCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  gemm::run_mma(call, context);
}

void launch_simt(const GemmCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  gemm::run_simt(call, context);
}

}  // namespace

constinit const GemmKernel few_rows_gemm = {.name = "few_rows",
                                            .supports = supports_few_rows,
                                            .workspace = few_workspace,
                                            .launch = launch_few_rows,
                                            .yields = few_rows_yields};
constinit const GemmKernel wgmma_gemm = {.name = "wgmma",
                                         .supports = supports_wgmma,
                                         .configure = configure_wgmma,
                                         .launch_configured = launch_wgmma};
constinit const GemmKernel split_gemm = {
    .name = "split", .supports = supports_split, .workspace = split_workspace, .launch = launch_split};
constinit const GemmKernel mma_gemm = {
    .name = "mma", .supports = supports_mma, .workspace = no_workspace, .launch = launch_mma};
constinit const GemmKernel simt_gemm = {
    .name = "simt", .supports = supports_simt, .workspace = no_workspace, .launch = launch_simt};

}  // namespace tilewise::cuda
