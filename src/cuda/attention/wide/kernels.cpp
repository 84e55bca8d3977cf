#include "attention/kernel.h"
#include "cuda/attention/wide/wide.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {
namespace {

/// The least number of multiplications per head: below it, launches take more time than the products save.
constexpr std::int64_t least_work = std::int64_t{1} << 25;

std::string supports(const AttentionProblem& problem) {
  if (const std::string reason = unsuited_device(problem.device); !reason.empty()) return reason;
  if (problem.dtype == DType::f64) return "takes f32, f16 and bf16, not f64";
  if (const std::string reason = unsuited_piece(problem); !reason.empty()) return reason;
  if (problem.layout != Layout::dense) return "takes dense tensors alone, not packed or paged ones";
  if (problem.features.block_mask) return "takes no block mask";
  if (problem.features.logit_scale) return "takes no logit scale: its products have one scale for all heads";
  if (problem.features.key_lengths) return "takes no key lengths: it would read the keys past them";
  if (problem.features.mask_gradient) return "keeps no score gradients for a mask's";
  if (std::max(problem.dim_qk, problem.dim_v) <= 128) return "is for head dims above 128";
  const std::int64_t dims = problem.dim_qk + problem.dim_v;
  if (problem.length_q * problem.length_k < (least_work + dims - 1) / dims) {
    return "launches products for each head, for which heads are too small";
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
