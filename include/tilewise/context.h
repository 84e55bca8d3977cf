#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

/// The one seam for CPU threads. `run(n, body)` calls body(0) … body(n-1), in any order and on any threads,
/// and returns when all are done. `threads` is how many may run at once: it sizes the workspace and nothing
/// else; results never depend on it. More than `most_threads` count as that many.
struct ParallelFor {
  static constexpr int most_threads = 1024;
  using Body = std::function<void(std::int64_t)>;
  std::function<void(std::int64_t, const Body&)> run;
  int threads = 1;
};

/// OpenMP's threads; `threads` 0 means as many as OpenMP would use. A forked child has not inherited them:
/// there, and in a library that was built without OpenMP, each call starts threads of its own.
ParallelFor openmp_parallel_for(int threads = 0);
/// The calling thread alone.
ParallelFor serial_parallel_for();

/// SIMD levels the CPU kernels can use on this machine, best first: "avx512", "avx2", "sse4", "neon".
std::vector<std::string_view> simd_levels();

/// Memory a call may use and need not clean up. Ask a call's `*_workspace` function for its size.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Where and how a call runs.
struct Context {
  Device device{};
  void* stream = nullptr;  ///< a cudaStream_t on CUDA devices
  Workspace workspace{};
  ParallelFor parallel_for = openmp_parallel_for();
  /// SIMD level of the CPU kernels; empty is the best one present. See simd_levels().
  std::string_view simd_level{};
  /// Looks at index tensors on a CUDA device before the call, as CPU calls always do, and throws what is
  /// wrong with them. This waits for the stream, so it is for debugging; TILEWISE_CHECK=1 asks for it
  /// everywhere.
  bool check_indices = false;
};

}  // namespace tilewise
#pragma GCC visibility pop
