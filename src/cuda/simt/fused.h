#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

void fused_forward(const AttentionCall& call, const Context& context);
void fused_backward(const AttentionCall& call, const Context& context);
std::size_t fused_backward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::simt
