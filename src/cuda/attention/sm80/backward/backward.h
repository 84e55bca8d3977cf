#pragma once

#include "core/kernel_list.h"
#include "cuda/attention/common/backward/backward.h"

namespace tilewise::cuda::mma {

Configuration configure_backward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, int row, const Context& context);

/// The least shared memory, in bytes, that a CTA needs for a problem.
std::size_t backward_shared_bytes(const AttentionProblem& problem);

/// The kernels of a storage type by the row of their table, each compiled in a file of its own.
template <typename T>
void plain_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context,
                       int row);
template <typename T>
void general_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context,
                         int row);

}  // namespace tilewise::cuda::mma
