#pragma once

#include "attention/call.h"
#include "core/kernel_list.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

/// The row of the table, or none where decode/decode.h takes the call. The workspace holds the partial
/// results of splits of the keys, where the call is split.
Configuration configure_forward(const AttentionCall& call, const Context& context);
void forward(const AttentionCall& call, const Configuration& configuration, const Context& context);

/// The kernels of a storage type by the row of their table, each compiled in a file of its own.
template <typename T>
void plain_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void general_forward_of(const AttentionCall& call, const Context& context, int row);

}  // namespace tilewise::cuda::mma
