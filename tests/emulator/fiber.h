#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Fibers: their stacks, and switching from one to another.

namespace tilewise::emulator {

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

/// Saves the caller's registers and stack pointer, and continues on another stack.
extern "C" void tilewise_switch_stack(void** save, void* to);

/// The stacks of one thread of the operating system, which all its blocks reuse.
class FiberStacks {
 public:
  FiberStacks() = default;
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;
  ~FiberStacks() {
    for (std::byte* stack : stacks_) munmap(stack, bytes);
  }

  /// Prepares a fiber that starts with `function`, which must not return. Returns its stack pointer.
  void* begin(std::size_t number, void (*function)()) {
    while (stacks_.size() <= number) {
      void* stack =
          mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) throw std::bad_alloc();
      stacks_.push_back(static_cast<std::byte*>(stack));
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stacks_[number], bytes);
#endif
    auto* top = reinterpret_cast<std::uintptr_t*>(stacks_[number] + bytes - 128);
    for (int n = 0; n < 6; ++n) top[n] = 0;
    top[6] = reinterpret_cast<std::uintptr_t>(function);
    return top;
  }
  const std::byte* lowest(std::size_t number) const { return stacks_[number]; }

#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t bytes = std::size_t{1} << 20;
#else
  static constexpr std::size_t bytes = std::size_t{1} << 18;
#endif
  const void* scheduler_lowest = nullptr;
  std::size_t scheduler_bytes = 0;

 private:
  std::vector<std::byte*> stacks_;
};

#if defined(__SANITIZE_ADDRESS__)
/// Called in a fiber that has just started. Tells `stacks` the scheduler's stack, from which the fiber was
/// started.
inline void finish_switch(void* fake, FiberStacks& stacks) {
  __sanitizer_finish_switch_fiber(fake, &stacks.scheduler_lowest, &stacks.scheduler_bytes);
}
/// Switches from a fiber to the scheduler. `fake` is null if the fiber ends.
inline void switch_fiber(void** save, void* to, void** fake, FiberStacks& stacks) {
  __sanitizer_start_switch_fiber(fake, stacks.scheduler_lowest, stacks.scheduler_bytes);
  tilewise_switch_stack(save, to);
  if (fake != nullptr) __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
}
/// Switches from the scheduler to a fiber.
inline void resume_fiber(void** save, void* to, void*, FiberStacks& stacks, std::size_t number) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stacks.lowest(number), FiberStacks::bytes);
  tilewise_switch_stack(save, to);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
inline void poison_behind(const void* from, std::size_t bytes) { __asan_poison_memory_region(from, bytes); }
inline void unpoison_behind(const void* from, std::size_t bytes) {
  __asan_unpoison_memory_region(from, bytes);
}
#else
inline void finish_switch(void*, FiberStacks&) {}
inline void switch_fiber(void** save, void* to, void**, FiberStacks&) { tilewise_switch_stack(save, to); }
inline void resume_fiber(void** save, void* to, void*, FiberStacks&, std::size_t) {
  tilewise_switch_stack(save, to);
}
inline void poison_behind(const void*, std::size_t) {}
inline void unpoison_behind(const void*, std::size_t) {}
#endif

}  // namespace tilewise::emulator
