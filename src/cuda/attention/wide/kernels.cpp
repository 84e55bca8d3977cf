#include <algorithm>

#include "attention/kernel.h"
#include "core/reasons.h"
#include "cuda/attention/wide/wide.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

/// The least number of multiplications per head: below it, launches take more time than the products save.
constexpr std::int64_t least_work = std::int64_t{1} << 25;

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.batch_invariant)
    return "cuts its products by the size of the batch, so it is not batch_invariant";
  if (const std::string reason = unsuited_piece(problem); !reason.empty()) return reason;
  if (problem.layout != Layout::dense) return "supports dense tensors only, not packed or paged ones";
  if (problem.features.block_mask) return "does not support block masks";
  if (problem.features.logit_scale) return "does not support a logit scale: its heads share one scale";
  if (problem.features.key_lengths) return "does not support key lengths: it would read the keys past them";
  if (problem.features.mask_gradient) return "does not support the gradient of a mask";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim <= 128) return needs("a head dim above 128", dim);
  const std::int64_t dims = problem.dim_qk + problem.dim_v;
  if (problem.length_q * problem.length_k < (least_work + dims - 1) / dims) {
    return needs("Sq * Sk * (D + Dv) of at least 2^25", problem.length_q * problem.length_k * dims);
  }
  return {};
}

std::size_t workspace(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  return call.problem.pass == Pass::forward ? wide::forward_workspace(call, context)
                                            : wide::backward_workspace(call, context);
}

void launch(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  (call.problem.pass == Pass::forward ? wide::forward : wide::backward)(call, context);
}

}  // namespace

constinit const AttentionKernel wide_attention = {
    .name = "wide", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cuda
