#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/call.h"
#include "core/kernel_list.h"
#include "cuda/attention/common/f32/split_rows.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma_f32 {

Configuration configure_forward(const AttentionCall& call, const Context& context);
void forward(const AttentionCall& call, int row, const Context& context);

/// The least shared memory with which a CTA can take head dims up to `dim`, whichever table a call uses.
std::size_t forward_shared_bytes(std::int64_t dim);

/// The kernels of each table, compiled in a file of their own.
Configuration configure_full_forward(const AttentionCall& call, const Context& context);
ForwardSpace full_forward(const AttentionCall& call, int row, const Context& context);
Configuration configure_tf32_forward(const AttentionCall& call, const Context& context);
ForwardSpace tf32_forward(const AttentionCall& call, int row, const Context& context);

}  // namespace tilewise::cuda::mma_f32
