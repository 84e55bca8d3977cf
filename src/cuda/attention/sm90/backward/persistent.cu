#include "core/reasons.h"
#include "cuda/attention/sm90/backward/backward.h"
#include "cuda/attention/sm90/backward/run.cuh"

namespace tilewise::cuda::wgmma_backward {

std::string unsuited_persistent(const AttentionProblem& problem) {
  if (const std::string reason = unsuited(problem); !reason.empty()) return reason;
  if (is_general(problem)) return "does not support masks, dropout, softcap, ALiBi or sinks";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim <= 64 || dim > 128) return needs("head dims of 65 to 128", dim);
  return {};
}

std::size_t persistent_workspace(const AttentionCall& call) {
  return workspace_bytes<PersistentConfigs>(call);
}

void run_persistent(const AttentionCall& call, const Context& context) {
  run_in<PersistentConfigs>(call, context);
}

}  // namespace tilewise::cuda::wgmma_backward
