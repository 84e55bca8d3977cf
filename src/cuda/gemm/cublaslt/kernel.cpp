#include "gemm/kernel.h"
#include "cuda/gemm/cublaslt/cublaslt.h"
#include "cuda/gemm/sm90/tiles/choice.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

std::string supports(const GemmProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) {
    return "takes f16 and bf16, not " + std::string(to_string(problem.dtype));
  }
  if (problem.out_dtype != problem.dtype) return "sums up in tensor cores, which f32 is too precise for";
  if (problem.gated) return "has no gates";
  if (problem.activation != Activation::none && (problem.residual || problem.accumulate)) {
    return "adds a residual before an activation";
  }
  if (problem.k == 0) return "takes no less than one summand";
  if (problem.residual && problem.accumulate) return "adds a residual or accumulates, not both";
  if (!problem.as_blas) {
    return "takes rows that do not overlap, and a bias in the type of a from a multiple of 16 bytes on, "
           "alone";
  }
  if (problem.bias && !problem.aligned) {
    return "takes a bias where rows begin at multiples of 16 bytes alone: else it is less exact";
  }
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (problem.m > most || problem.n > most || problem.k > most) return "takes dimensions to 2^30";
  try {
    if (device_properties(problem.device.index).compute_capability < 80)
      return "needs compute capability 8.0";
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
  if (problem.activation != Activation::none) return "leaves activations of long sums to wgmma";
  if (!problem.a_by_rows || !problem.b_by_rows) {
    constexpr std::int64_t large = std::int64_t{1} << 25;
    return problem.m * problem.n < large ? "" : "leaves large results of factors by columns to wgmma";
  }
  const int multiprocessors = device_properties(problem.device.index).multiprocessors;
  const gemm::GemmConfig& tile = gemm::Plain::rows[gemm::choose_row<gemm::Plain>(problem, multiprocessors)];
  const auto rounds = gemm::Rounds::of(problem, tile, multiprocessors);
  const bool full = rounds.count() > 1 && rounds.full() >= 0.95;
  const bool pairs = tile.pair == gemm::Pair::shares_b && full;
  const bool wide = tile.columns == 192 && problem.k >= 4096 && full;  // K = 3072 is too small
  if (pairs || wide || tile.row_tiles * tile.columns >= 2 * 168) {
    return "leaves what fills tiles of " + std::to_string(tile.rows_together()) + " x " +
           std::to_string(tile.columns) + " to wgmma";
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
