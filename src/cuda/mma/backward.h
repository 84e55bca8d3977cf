#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::mma {

void backward(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

/// What comes before and after the kernel over tiles.
void prepare_backward(const AttentionCall& call, const Context& context);
void finish_backward(const AttentionCall& call, const Context& context);

/// Whether a call takes the general kernel.
inline bool general_backward(const AttentionProblem& problem) {
  return problem.features.needs_more_than_band() || !problem.backward.aligned_rows;
}
inline bool general_backward(const AttentionCall& call) { return general_backward(call.problem); }

/// Bytes of shared memory that a block needs at least, for a head dim.
std::size_t backward_shared_bytes(std::int64_t dim, bool general);

struct BackwardSpace;

/// The kernels of a storage type, each compiled in a file of its own.
template <typename T>
void plain_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context);
template <typename T>
void general_backward_of(const AttentionCall& call, const BackwardSpace& space, const Context& context);

}  // namespace tilewise::cuda::mma
