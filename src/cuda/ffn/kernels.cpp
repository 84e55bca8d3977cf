#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/arena.h"
#include "cuda/gemm/sm90/few_rows/few_tuning.h"
#include "cuda/gemm/sm90/wgmma.h"
#include "cuda/runtime/device.h"
#include "ffn/kernel.h"
#include "gemm/compose.h"

namespace tilewise::cuda {
namespace {

// A feed-forward network on few tokens: two GEMMs for few rows. The second begins to read its weights while
// the first is still running (PDL).

GemmProblem up_problem(const FfnProblem& problem) {
  return {.device = problem.device,
          .dtype = problem.dtype,
          .out_dtype = problem.dtype,
          .m = problem.tokens,
          .n = problem.hidden,
          .k = problem.embed,
          .activation = problem.activation,
          .gated = problem.gated,
          .aligned = problem.aligned && problem.hidden % 8 == 0};
}
GemmProblem down_problem(const FfnProblem& problem) {
  return {.device = problem.device,
          .dtype = problem.dtype,
          .out_dtype = problem.dtype,
          .m = problem.tokens,
          .n = problem.out,
          .k = problem.hidden,
          .residual = problem.residual,
          .aligned = problem.aligned};
}

std::string supports(const FfnProblem& problem) {
  if (problem.pass == Pass::backward) return "has no backward";
  if (problem.kept) return "does not keep the products for backward";
  if (problem.tokens == 0) return "needs at least one token";
  if (!problem.by_rows) return "needs row-major weights";
  const std::string reason = few_rows_gemm.supports(up_problem(problem));
  return reason.empty() ? few_rows_gemm.supports(down_problem(problem)) : reason;
}

/// Tokens are computed in chunks, so that h = f(gate) · up stays within max_intermediate_bytes.
struct Plan {
  std::int64_t chunk;  ///< tokens
  Matrix h;            ///< [chunk, F]
};

Plan plan_of(const FfnCall& call, Arena& arena) {
  const FfnProblem& problem = call.problem;
  const std::int64_t row_bytes = problem.hidden * static_cast<std::int64_t>(size_of(problem.dtype));
  std::int64_t chunk = problem.tokens;
  if (call.max_intermediate_bytes > 0) {
    const std::size_t most = call.max_intermediate_bytes / static_cast<std::size_t>(row_bytes);
    chunk = static_cast<std::int64_t>(std::clamp<std::size_t>(most, 1, static_cast<std::size_t>(chunk)));
  }
  return {chunk,
          {.data = arena.take<std::byte>(chunk, row_bytes),
           .dtype = problem.dtype,
           .rows = chunk,
           .columns = problem.hidden,
           .stride_row = problem.hidden}};
}

GemmCall up_product(const FfnCall& call, const Plan& plan, std::int64_t first, std::int64_t count) {
  return gemm_call(call.problem.device, call.x.rows_from(first, count), call.up, plan.h.rows_from(0, count),
                   {.gate = call.gate,
                    .bias = call.up_bias,
                    .gate_bias = call.gate_bias,
                    .activation = call.problem.activation});
}

GemmCall down_product(const FfnCall& call, const Plan& plan, std::int64_t first, std::int64_t count) {
  return gemm_call(call.problem.device, plan.h.rows_from(0, count), call.down,
                   call.out.rows_from(first, count),
                   {.residual = call.problem.residual ? call.residual.rows_from(first, count) : Matrix(),
                    .bias = call.down_bias});
}

std::size_t workspace(const FfnCall& call, const Context& context) {
  Arena arena(nullptr);
  const Plan plan = plan_of(call, arena);
  return arena.rounded() +
         std::max(few_rows_gemm.workspace(up_product(call, plan, 0, plan.chunk), context),
                  few_rows_gemm.workspace(down_product(call, plan, 0, plan.chunk), context));
}

void launch_on_device([[maybe_unused]] const FfnCall& call, [[maybe_unused]] const Context& context) {
#ifdef TILEWISE_HAS_WGMMA
  if (call.problem.out == 0) return;
  Arena arena(context.workspace.data);
  const Plan plan = plan_of(call, arena);
  Context remaining = context;
  remaining.workspace.data = static_cast<std::byte*>(context.workspace.data) + arena.rounded();
  remaining.workspace.bytes -= arena.rounded();
  const DeviceGuard guard(context.device.index);
  const auto run = [&]<typename T>() {
    for (std::int64_t first = 0; first < call.problem.tokens; first += plan.chunk) {
      const std::int64_t count = std::min(plan.chunk, call.problem.tokens - first);
      gemm::few_of<T>(up_product(call, plan, first, count), remaining, gemm::InChain::first);
      gemm::few_of<T>(down_product(call, plan, first, count), remaining, gemm::InChain::second);
    }
  };
  call.problem.dtype == DType::f16 ? run.template operator()<__half>()
                                   : run.template operator()<__nv_bfloat16>();
#endif
}

}  // namespace

constinit const FfnKernel few_rows_ffn = {
    .name = "few_rows", .supports = supports, .workspace = workspace, .launch = launch_on_device};

}  // namespace tilewise::cuda
