#include "cuda/attention/sm90/backward/backward.h"
#include "cuda/attention/sm90/backward/run.cuh"

namespace tilewise::cuda::wgmma_backward {

std::string unsuited_lagged(const AttentionProblem& problem) {
  if (const std::string reason = unsuited(problem); !reason.empty()) return reason;
  if (!is_general(problem)) return "needs a mask, dropout, softcap, ALiBi or sinks";
  if (has_separate_dmask(problem))
    return "does not support gradients of masks that are broadcast or used with softcap";
  if (stages_of(LaggedConfigs::rows[row_of<LaggedConfigs>(problem)], problem).mask == 0) {
    return "lacks shared memory for these features together";
  }
  return {};
}

std::size_t lagged_workspace(const AttentionCall& call) { return workspace_bytes<LaggedConfigs>(call); }

void run_lagged(const AttentionCall& call, const Context& context) { run_in<LaggedConfigs>(call, context); }

}  // namespace tilewise::cuda::wgmma_backward
