#pragma once

#include "cuda/attention/common/backward/backward.h"

namespace tilewise::cuda::mma {

void backward(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

/// Bytes of shared memory that a block needs at least.
std::size_t backward_shared_bytes(const AttentionProblem& problem);

/// The kernels of a storage type, each compiled in a file of its own.
template <typename T>
void plain_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context);
template <typename T>
void general_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context);

}  // namespace tilewise::cuda::mma
