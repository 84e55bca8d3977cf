#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_backward {

void backward(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wgmma_backward
