#pragma once

#include "attention/call.h"
#include "core/kernel_list.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

/// A row of a table, or none for calls that decode/stream.h takes. The workspace is what splits of keys leave
/// for each other, where the call is cut into some.
Configuration configure_forward(const AttentionCall& call, const Context& context);
void forward(const AttentionCall& call, const Configuration& configuration, const Context& context);

/// The kernels of a storage type by a row of their table, each compiled in a file of its own.
template <typename T>
void plain_forward_of(const AttentionCall& call, const Context& context, int row);
template <typename T>
void general_forward_of(const AttentionCall& call, const Context& context, int row);

}  // namespace tilewise::cuda::mma
