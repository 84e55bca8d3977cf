#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) && defined(TILEWISE_EMULATOR)
#define TILEWISE_FORBIDS
#include <sanitizer/asan_interface.h>
#endif

namespace tilewise::test {

/// Marks device memory that no kernel may access until it is permitted again. In the emulator
/// AddressSanitizer reports accesses to it; elsewhere this does nothing.
inline void forbid([[maybe_unused]] const void* from, [[maybe_unused]] std::size_t bytes) {
#ifdef TILEWISE_FORBIDS
  __asan_poison_memory_region(from, bytes);
#endif
}
inline void permit([[maybe_unused]] const void* from, [[maybe_unused]] std::size_t bytes) {
#ifdef TILEWISE_FORBIDS
  __asan_unpoison_memory_region(from, bytes);
#endif
}

}  // namespace tilewise::test
