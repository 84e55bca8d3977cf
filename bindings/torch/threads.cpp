#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "tilewise/context.h"

// Replaces src/core/parallel.cpp in this module: tasks run on torch's own threads, since a second pool in the
// process would compete with them for the cores.

namespace tilewise {
namespace {

// A forked child has none of its parent's threads, and its OpenMP runtime would wait for them forever.
std::atomic<bool> forked = false;
[[maybe_unused]] const int fork_is_watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

ParallelFor openmp_parallel_for(int threads) {
  if (forked) return serial_parallel_for();
  return {.run =
              [](std::int64_t n, const ParallelFor::Body& body) {
                torch::stable::parallel_for(0, n, 1, [&body](std::int64_t first, std::int64_t last) {
                  for (std::int64_t index = first; index < last; ++index) body(index);
                });
              },
          .threads = threads > 0 ? threads : static_cast<int>(torch::stable::get_num_threads())};
}

ParallelFor serial_parallel_for() {
  return {.run =
              [](std::int64_t n, const ParallelFor::Body& body) {
                for (std::int64_t index = 0; index < n; ++index) body(index);
              },
          .threads = 1};
}

}  // namespace tilewise
