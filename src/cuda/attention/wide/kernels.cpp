#include <algorithm>

#include "attention/kernel.h"
#include "core/reasons.h"
#include "cuda/attention/sm90/wide/batched.h"
#include "cuda/attention/wide/wide.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

/// The least number of multiplications of the heads that are computed together: below it, launches take more
/// time than the products save.
constexpr std::int64_t least_work = std::int64_t{1} << 25;

std::string supports_together(const AttentionProblem& problem, std::int64_t heads) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.batch_invariant)
    return "cuts its products by the size of the batch, so it is not batch_invariant";
  if (const std::string reason = unsuited_piece(problem); !reason.empty()) return reason;
  if (problem.layout != Layout::dense) return "supports dense tensors only, not packed or paged ones";
  if (problem.features.logit_scale) return "does not support a logit scale: its heads share one scale";
  if (problem.features.key_lengths) return "does not support key lengths: it would read the keys past them";
  if (problem.features.mask_gradient) return "does not support the gradient of a mask";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim <= 128) return needs("a head dim above 128", dim);
  const std::int64_t dims = problem.dim_qk + problem.dim_v;
  const std::int64_t least = least_work / std::max<std::int64_t>(heads, 1);
  if (problem.length_q * problem.length_k < (least + dims - 1) / dims) {
    const std::string together = heads == 1 ? "" : "for all heads, ";
    return needs(together + "Sq * Sk * (D + Dv) of at least 2^25",
                 problem.length_q * problem.length_k * dims * heads);
  }
  return {};
}

std::string supports(const AttentionProblem& problem) {
  if (problem.features.block_mask) return "does not support block masks";
  return supports_together(problem, 1);
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

std::string supports_batched(const AttentionProblem& problem) {
  const std::int64_t heads = problem.batch * problem.heads_kv;
  if (const std::string reason = supports_together(problem, heads); !reason.empty()) return reason;
  if (problem.dtype != DType::f32) return needs("f32", to_string(problem.dtype));
  if (!problem.aligned || (problem.pass == Pass::backward && !problem.backward.aligned_rows)) {
    return "needs rows that start at multiples of 16 bytes, without negative strides";
  }
#ifndef TILEWISE_HAS_WGMMA
  return "this build has no code for sm_90a";
#endif
  return reason_against_device(problem.device, [](const DeviceProperties& device) {
    return device.compute_capability != 90 ? "needs compute capability 9.0 (Hopper)" : "";
  });
}
#ifdef TILEWISE_HAS_WGMMA
std::size_t batched_workspace(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  return call.problem.pass == Pass::forward ? wide::batched_forward_workspace(call)
                                            : wide::batched_backward_workspace(call);
}
void launch_batched(const AttentionCall& call, const Context& context) {
  const DeviceGuard guard(context.device.index);
  (call.problem.pass == Pass::forward ? wide::batched_forward : wide::batched_backward)(call, context);
}
#else
std::size_t batched_workspace(const AttentionCall&, const Context&) { return 0; }
void launch_batched(const AttentionCall&, const Context&) {}
#endif

}  // namespace

constinit const AttentionKernel wide_batched_attention = {.name = "wide_batched",
                                                          .supports = supports_batched,
                                                          .workspace = batched_workspace,
                                                          .launch = launch_batched};

constinit const AttentionKernel wide_attention = {
    .name = "wide", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cuda
