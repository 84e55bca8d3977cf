#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_backward {

/// The reason why backward() cannot compute the problem; empty if it can.
std::string unsuited(const AttentionProblem& problem);
std::size_t backward_workspace(const AttentionCall& call);
void backward(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wgmma_backward
