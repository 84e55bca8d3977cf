#pragma once

#include "attention/call.h"
#include "cuda/attention/sm90/decode/plan.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma {

/// Each runs the kernel of a row of its table, for a storage type. Each is compiled in a file of its own.
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
