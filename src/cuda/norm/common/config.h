#pragma once

#include <algorithm>

#include "norm/call.h"

namespace tilewise::cuda::norm {

/// How a row is shared out: chunks of 16 bytes, `chunks` a thread. Short rows are a warp's, long ones a
/// block's. Where rows do not lie in chunks, or are longer than that, elements are taken one by one.
struct RowShape {
  bool in_chunks = false;
  bool one_warp = false;
  bool late = false;  ///< backward alone: sums over a row are joined beside the next one
  int chunks = 0;     ///< 1, 2 or 4
  int threads = 256;  ///< a block
  int rows = 1;       ///< a block at a time
};

/// The most threads of a block, which is what registers are shared out for.
template <int chunks, bool one_warp>
inline constexpr int most_threads = one_warp      ? 256
                                    : chunks == 2 ? 512
                                                  : 1024;

inline RowShape shape_of(const NormCall& call) {
  const NormProblem& problem = call.problem;
  const std::int64_t size = 16 / static_cast<std::int64_t>(size_of(problem.dtype));
  const auto aligned = [](const Vector& vector) {
    return reinterpret_cast<std::uintptr_t>(vector.data) % 16 == 0;
  };
  const std::int64_t count = problem.dim / size;
  if (!problem.aligned || problem.dim % size != 0 || !aligned(call.weight) || !aligned(call.bias) ||
      count > 4096) {
    return {};
  }
  if (count <= 128) {
    return {.in_chunks = true, .one_warp = true, .chunks = count <= 32 ? 1 : count <= 64 ? 2 : 4, .rows = 8};
  }
  const int chunks = count <= 1024 ? 2 : 4;
  const auto threads = static_cast<int>((count + chunks - 1) / chunks);
  return {.in_chunks = true, .chunks = chunks, .threads = (threads + 31) / 32 * 32};
}

/// Dynamic shared memory of a backward kernel. Beyond 48 KiB with the kernel's own variables it has to be
/// asked for, which a launch does beyond 48 KiB without them.
inline std::size_t asked_for(std::size_t bytes) {
  constexpr std::size_t own = 2048, without_asking = 48 * 1024;
  return bytes + own > without_asking ? std::max(bytes, without_asking + 16) : bytes;
}

/// Blocks of backward, which stay: as many as there are at a time, or as take all rows once.
inline int blocks_that_stay(std::int64_t takes, int multiprocessors, int each) {
  return static_cast<int>(std::clamp<std::int64_t>(takes, 1, std::int64_t{multiprocessors} * each));
}

void forward(const NormCall& call, const Context& context);
void backward(const NormCall& call, const Context& context);
std::size_t backward_workspace(const NormCall& call, const Context& context);

/// Backward of rows that come by bulk copies (backward_ring.cu).
void ring_backward(const NormCall& call, const Context& context);
std::size_t ring_workspace(const NormCall& call, const Context& context);
/// What it takes of shared memory.
std::size_t ring_bytes(const NormProblem& problem);

}  // namespace tilewise::cuda::norm
