#pragma once

#include <algorithm>

#include "norm/call.h"

namespace tilewise::cuda::norm {

/// How threads share a row. `vectorized`: each thread has `chunks` chunks of 16 bytes; a warp has a short
/// row, a CTA a long one. Rows that are not aligned for that, or too long, are read element by element.
struct RowShape {
  bool vectorized = false;
  bool one_warp = false;   ///< a warp has a row
  bool pipelined = false;  ///< backward: one barrier per row (backward_passes.cuh)
  int chunks = 0;          ///< of a thread: 1, 2 or 4
  int threads = 256;       ///< of a CTA
  int rows = 1;            ///< of a CTA at a time
};

/// The most threads of a CTA, for __launch_bounds__.
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
    return {.vectorized = true, .one_warp = true, .chunks = count <= 32 ? 1 : count <= 64 ? 2 : 4, .rows = 8};
  }
  const int chunks = count <= 1024 ? 2 : 4;
  const auto threads = static_cast<int>((count + chunks - 1) / chunks);
  return {.vectorized = true, .chunks = chunks, .threads = (threads + 31) / 32 * 32};
}

/// The dynamic shared memory to launch a backward kernel with that needs `bytes`. A kernel must opt in to
/// more than 48 KiB in all. launch() does so where the dynamic part alone exceeds 48 KiB, so `bytes` is
/// raised to that where static variables bring the sum above it.
inline std::size_t dynamic_shared_bytes(std::size_t bytes) {
  constexpr std::size_t static_bytes = 2048, without_asking = 48 * 1024;
  return bytes + static_bytes > without_asking ? std::max(bytes, without_asking + 16) : bytes;
}

/// The number of persistent CTAs of backward: as many as run at a time, but no more than there are units of
/// work.
inline int persistent_ctas(std::int64_t units, int multiprocessors, int per_sm) {
  return static_cast<int>(std::clamp<std::int64_t>(units, 1, std::int64_t{multiprocessors} * per_sm));
}

void forward(const NormCall& call, const Context& context);
void backward(const NormCall& call, const Context& context);
std::size_t backward_workspace(const NormCall& call, const Context& context);

/// Kernel `ring`: backward of rows that are loaded by bulk copies (sm90/backward_ring.cu).
void ring_backward(const NormCall& call, const Context& context);
std::size_t ring_workspace(const NormCall& call, const Context& context);
/// Its bytes of shared memory.
std::size_t ring_bytes(const NormProblem& problem);

}  // namespace tilewise::cuda::norm
