#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

/// What parts of keys leave for each other, where the call is cut into some.
std::size_t forward_workspace(const AttentionCall& call, const Context& context);
void forward(const AttentionCall& call, const Context& context);

/// The kernels of a storage type, each compiled in a file of its own.
template <typename T>
void plain_forward_of(const AttentionCall& call, const Context& context);
template <typename T>
void general_forward_of(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::mma
