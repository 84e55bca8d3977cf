#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/runtime/check.h"

#ifdef TILEWISE_EMULATOR
#include "emulator.h"
#endif

namespace tilewise::cuda {

/// How a kernel is launched. Errors and profiles show the name.
struct Launch {
  const char* name;
  std::int64_t blocks;
  int threads;
  int layers = 1;  ///< the grid's second dimension
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  /// PDL (from sm_90 on): the kernel may start before the previous one has ended, for which it waits itself.
  bool early = false;
  /// Asks for the largest carve-out of shared memory, so that CTAs of other kernels fit beside its own.
  bool beside = false;
};

/// A kernel's state by device: the limit that its shared memory was raised to, and the driver's handle.
struct KnownKernel {
  static constexpr int devices = 64;
  std::atomic<std::size_t> shared_limit[devices];
  std::atomic<cudaFunction_t> function[devices];
};

/// launch() without types, which every file that launches would otherwise compile again. `arguments` has the
/// address of each argument.
void launch_untyped(const void* kernel, KnownKernel& known, const Launch& how, const void** arguments);

template <typename... Parameters>
void launch_typed(void (*kernel)(Parameters...), KnownKernel& known, const Launch& how,
                  const std::type_identity_t<Parameters>&... arguments) {
#ifdef TILEWISE_EMULATOR
  if (how.blocks == 0) return;
  if (how.blocks > 0x7fffffff) throw DeviceError(std::string(how.name) + ": more than 2^31 - 1 blocks");
  emulator::launch({.name = how.name,
                    .grid = {static_cast<unsigned>(how.blocks), static_cast<unsigned>(how.layers), 1},
                    .threads = static_cast<unsigned>(how.threads),
                    .shared_bytes = how.shared_bytes,
                    .early = how.early},
                   how.stream, [kernel, ... arguments = Parameters(arguments)] { kernel(arguments...); });
  return;
#endif
  const void* addresses[] = {&arguments..., nullptr};
  launch_untyped(reinterpret_cast<const void*>(kernel), known, how, addresses);
}

/// The one way to launch. Raises the kernel's limit of shared memory on the device if needed, marks a range
/// for profiles, and throws DeviceError with the kernel's name if the launch fails. Does nothing if there are
/// no blocks.
template <auto kernel, typename... Arguments>
void launch(const Launch& how, const Arguments&... arguments) {
#ifdef TILEWISE_EMULATOR
  if (false) kernel(arguments...);  // GCC 12 does not instantiate a template that is only named
#endif
  static constinit KnownKernel known = {};
  launch_typed(kernel, known, how, arguments...);
}

}  // namespace tilewise::cuda
