#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "tilewise/context.h"

namespace tilewise {
namespace {

// Runs tasks on new threads that end with the call. For builds without OpenMP, and where OpenMP's threads
// cannot be used.
void run_on_new_threads(std::int64_t n, int threads, const ParallelFor::Body& body) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t index = next++; index < n; index = next++) body(index);
  };
  std::vector<std::jthread> others;
  try {
    for (std::int64_t more = std::min<std::int64_t>(n, threads) - 1; more > 0; --more) {
      others.emplace_back(work);
    }
  } catch (const std::system_error&) {
    // The system has no more threads. Those that started do the work.
  }
  work();
}

#ifdef _OPENMP

// A forked child has none of its parent's threads, and its OpenMP runtime would wait for them forever.
std::atomic<bool> forked = false;
[[maybe_unused]] const int fork_is_watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

int default_threads() { return omp_get_max_threads(); }

void run_on_threads(std::int64_t n, int threads, const ParallelFor::Body& body) {
  if (forked) return run_on_new_threads(n, threads, body);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (n > 1 && threads > 1)
  for (std::int64_t index = 0; index < n; ++index) body(index);
}

#else

int default_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

void run_on_threads(std::int64_t n, int threads, const ParallelFor::Body& body) {
  run_on_new_threads(n, threads, body);
}

#endif

}  // namespace

ParallelFor openmp_parallel_for(int threads) {
  const int count = std::min(threads > 0 ? threads : default_threads(), ParallelFor::most_threads);
  return {.run = [count](std::int64_t n, const ParallelFor::Body& body) { run_on_threads(n, count, body); },
          .threads = count};
}

ParallelFor serial_parallel_for() {
  return {.run =
              [](std::int64_t n, const ParallelFor::Body& body) {
                for (std::int64_t index = 0; index < n; ++index) body(index);
              },
          .threads = 1};
}

}  // namespace tilewise
