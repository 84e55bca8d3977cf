#pragma once

#include "attention/call.h"
#include "core/kernel_list.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma_f32 {

/// A row of the table, or none for calls that the fused kernel takes.
Configuration configure_backward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, int row, const Context& context);

/// Sequences of fewer queries are the fused kernel's: they are few terms of dv.
inline constexpr int few_backward_queries = 128;

/// The shared memory a block needs, ours or the fused kernel's.
std::size_t backward_shared_bytes(std::int64_t dim);

}  // namespace tilewise::cuda::mma_f32
