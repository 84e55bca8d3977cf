#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_backward {

/// The reason why backward() cannot compute the problem; empty if it can.
std::string unsuited(const AttentionProblem& problem);
/// What of the problem no GPU has proven yet; empty if nothing.
std::string trial(const AttentionProblem& problem);
std::size_t backward_workspace(const AttentionCall& call);
void backward(const AttentionCall& call, const Context& context);

/// The same for `wgmma_lagged`, which takes calls with features.
std::string unsuited_lagged(const AttentionProblem& problem);
std::size_t lagged_workspace(const AttentionCall& call);
void run_lagged(const AttentionCall& call, const Context& context);

/// The same for `wgmma_persistent`, which takes calls without features.
std::string unsuited_persistent(const AttentionProblem& problem);
std::size_t persistent_workspace(const AttentionCall& call);
void run_persistent(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wgmma_backward
