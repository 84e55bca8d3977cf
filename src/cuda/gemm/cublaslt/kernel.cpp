#include "gemm/kernel.h"

#include <algorithm>

#include "core/reasons.h"
#include "cuda/gemm/cublaslt/cublaslt.h"
#include "cuda/gemm/sm90/tiles/choice.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string supports(const GemmProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return needs("f16 or bf16", to_string(problem.dtype));
  }
  if (problem.out_dtype != problem.dtype)
    return "accumulates in tensor cores, which is too inexact for f32 results";
  if (problem.gated) return "does not support a gate";
  if (problem.activation != Activation::none && (problem.residual || problem.accumulate)) {
    return "does not support an activation together with a residual or accumulate";
  }
  if (problem.k == 0) return "needs K >= 1";
  if (problem.residual && problem.accumulate) return "does not support a residual together with accumulate";
  if (!problem.as_blas) {
    return "needs rows that do not overlap, and a contiguous bias in the type of a that starts at a multiple "
           "of 16 bytes";
  }
  if (problem.bias && !problem.aligned) {
    return "needs rows that start at multiples of 16 bytes with a bias: it is less exact otherwise";
  }
  constexpr std::int64_t most = std::int64_t{1} << 30;
  const std::int64_t extent = std::max({problem.m, problem.n, problem.k});
  if (extent > most) return supports_up_to("M, N and K", most, extent);
  try {
    if (device_properties(problem.device.index).compute_capability < 80)
      return "needs compute capability 8.0 or higher";
  } catch (const DeviceError& error) {
    return error.what();
  }
  return missing_cublaslt(problem.device.index);
}

// Measured on an H200 (docs/gemm.md): cuBLASLt is ahead because it hides more of a tile's prologue and
// epilogue, wgmma where an activation would be a pass of its own, or where its large tiles fill all SMs.
std::string yields(const GemmProblem& problem) {
  if (!wgmma_gemm.supports(problem).empty()) return {};
  constexpr std::int64_t few_summands = 2048;
  if (problem.k < few_summands) return {};
  if (problem.activation != Activation::none) {
    return "wgmma is faster for activations with K >= " + std::to_string(few_summands);
  }
  if (!problem.a_by_rows || !problem.b_by_rows) {
    constexpr std::int64_t large = std::int64_t{1} << 25;
    return problem.m * problem.n < large ? "" : "wgmma is faster for large results of column-major matrices";
  }
  const int multiprocessors = device_properties(problem.device.index).multiprocessors;
  const gemm::GemmConfig& tile = gemm::Plain::rows[gemm::choose_row<gemm::Plain>(problem, multiprocessors)];
  const auto rounds = gemm::Rounds::of(problem, tile, multiprocessors);
  const bool full = rounds.count() > 1 && rounds.full() >= 0.95;
  const bool pairs = tile.pair == gemm::Pair::shares_b && full;
  const bool wide = tile.columns == 192 && problem.k >= 4096 && full;  // K = 3072 is too small
  if (pairs || wide || tile.row_tiles * tile.columns >= 2 * 168) {
    return "wgmma is faster: its tiles of " + std::to_string(tile.rows_together()) + " x " +
           std::to_string(tile.columns) + " fill the SMs";
  }
  return {};
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
