#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tilewise/context.h"

namespace tilewise {

/// The number of workers for this many tasks.
inline std::int64_t workers_for(const ParallelFor& parallel_for, std::int64_t tasks) {
  return std::min<std::int64_t>(tasks, std::min(parallel_for.threads, ParallelFor::most_threads));
}

/// Runs task(worker, index) for every index below `count`. Free workers take the next index, so the longest
/// tasks should come first. There are workers_for(parallel_for, count) workers; `worker` can select scratch
/// memory.
template <typename Task>
void for_each_task(const ParallelFor& parallel_for, std::int64_t count, const Task& task) {
  const std::int64_t workers = workers_for(parallel_for, count);
  if (workers <= 1) {
    for (std::int64_t index = 0; index < count; ++index) task(0, index);
    return;
  }
  // One struct, since a std::function can hold one reference without allocating.
  struct Shared {
    const Task& task;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};
  } shared{task, count};
  parallel_for.run(workers, [&shared](std::int64_t worker) {
    for (std::int64_t index = shared.next++; index < shared.count; index = shared.next++)
      shared.task(worker, index);
  });
}

}  // namespace tilewise
