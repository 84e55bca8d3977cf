#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

/// How the library runs tasks on CPU threads. `run(n, body)` calls body(0) … body(n-1), in any order and on
/// any threads, and returns when all are done. `threads` is the number that may run at once, at most
/// `most_threads`. It determines the size of the workspace; results never depend on it.
struct ParallelFor {
  static constexpr int most_threads = 1024;
  using Body = std::function<void(std::int64_t)>;
  std::function<void(std::int64_t, const Body&)> run;
  int threads = 1;
};

/// Runs tasks on OpenMP's threads; with `threads` 0, on as many as OpenMP would use. A forked child does not
/// inherit these threads. There, and in a library that was built without OpenMP, each call starts its own
/// threads.
ParallelFor openmp_parallel_for(int threads = 0);
/// Runs tasks on the calling thread.
ParallelFor serial_parallel_for();

/// The SIMD levels that CPU kernels can use on this machine, best first: of "avx512", "avx2", "sse4" and
/// "neon".
std::vector<std::string_view> simd_levels();

/// Scratch memory of a call, with any contents and any alignment. The call's `*_workspace` function says how
/// large it must be.
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
  /// The SIMD level of the CPU kernels, one of simd_levels(); empty: the best one.
  std::string_view simd_level{};
  /// Whether a call on a CUDA device checks the contents of its index tensors first, as CPU calls always do,
  /// and throws InvalidArgument if they are wrong. The check waits for the stream, so it is for debugging.
  /// TILEWISE_CHECK=1 turns it on for all calls.
  bool check_indices = false;
};

}  // namespace tilewise
#pragma GCC visibility pop
