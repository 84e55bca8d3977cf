#pragma once

#include "attention/call.h"
#include "cuda/attention/sm90/decode/plan.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma {

/// The kernels of a storage type, by a row of their table. Each is compiled in a file of its own.
template <typename T>
void forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void general_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void masked_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void combined_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void block_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void general_block_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void decode_forward_of(const AttentionCall& call, const Context& context, int row, const DecodePlan& plan);

}  // namespace tilewise::cuda::wgmma
