#pragma once

#include "attention/call.h"
#include "core/kernel_list.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma_f32 {

/// The row of the table, or none where the fused kernel computes the call.
Configuration configure_backward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, int row, const Context& context);

/// Sequences of fewer queries are left to the fused kernel, because dV would have few terms (limits.h).
inline constexpr int few_backward_queries = 128;

/// The shared memory that a CTA needs, of this kernel or of the fused one, which takes the heads that do not
/// fit.
std::size_t backward_shared_bytes(std::int64_t dim);

}  // namespace tilewise::cuda::mma_f32
