#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_backward {

/// Empty where backward() takes the problem, else why not.
std::string unsuited(const AttentionProblem& problem);
/// What of it no GPU has proven yet, or empty.
std::string trial(const AttentionProblem& problem);
std::size_t backward_workspace(const AttentionCall& call);
void backward(const AttentionCall& call, const Context& context);

/// The same of `wgmma_lagged`, for calls with features.
std::string unsuited_lagged(const AttentionProblem& problem);
std::size_t lagged_workspace(const AttentionCall& call);
void run_lagged(const AttentionCall& call, const Context& context);

/// And of `wgmma_persistent`, for calls without.
std::string unsuited_persistent(const AttentionProblem& problem);
std::size_t persistent_workspace(const AttentionCall& call);
void run_persistent(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wgmma_backward
