#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wide {

// `wide` for f32 on Hopper, with the products of many heads in one launch. Where heads are short,
// `wide` takes most of its time for launches: a product of one head takes six.

void batched_forward(const AttentionCall& call, const Context& context);
void batched_backward(const AttentionCall& call, const Context& context);
std::size_t batched_forward_workspace(const AttentionCall& call);
std::size_t batched_backward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::wide
