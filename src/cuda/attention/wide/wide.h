#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wide {

// Head dims that no tile of registers holds: the passes of `tiled`, in which the products are those of gemm,
// on tensor cores, and scores stand in memory for some rows of one head at a time.

void forward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, const Context& context);
std::size_t forward_workspace(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wide
