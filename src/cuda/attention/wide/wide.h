#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wide {

// Attention for head dims too large for a tile in registers. The passes are those of `tiled`, but the
// products are gemm's, on tensor cores. S is in memory, for a chunk of the rows of one head at a time.

void forward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, const Context& context);
std::size_t forward_workspace(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wide
