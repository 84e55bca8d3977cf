#pragma once

#include "attention/call.h"
#include "cuda/attention/common/f32/split_rows.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma_f32 {

void forward(const AttentionCall& call, const Context& context);
std::size_t forward_workspace(const AttentionCall& call);

/// The kernels of a table, each table compiled in a file of its own.
ForwardSpace full_forward_space(const AttentionCall& call, void* base);
void full_forward(const AttentionCall& call, const ForwardSpace& space, const Context& context);
ForwardSpace tf32_forward_space(const AttentionCall& call, void* base);
void tf32_forward(const AttentionCall& call, const ForwardSpace& space, const Context& context);

}  // namespace tilewise::cuda::mma_f32
