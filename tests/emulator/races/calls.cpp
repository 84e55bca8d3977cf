#include "races/state.h"

namespace tilewise::emulator::races {

namespace {

template <bool writes, bool reads>
void atomic_access(const void* data, std::size_t bytes, const void* return_address) {
  if (!watches(data)) return;
  const std::lock_guard guard(lock);
  place = place_of(return_address);
  access_bytes(data, bytes, {.writes = writes, .atomic = true}, by_thread(), own().clock);
  if (shared_cell(reinterpret_cast<std::uintptr_t>(data)) != nullptr) return;
  auto& flag = flags[reinterpret_cast<std::uintptr_t>(data)];
  if (reads) join(own().to_acquire, flag);
  if (writes && own().released != nullptr) join(flag, *own().released);
}

}  // namespace
}  // namespace tilewise::emulator::races

// The functions that code calls which is compiled with -fsanitize=thread.

using namespace tilewise::emulator::races;

#define TILEWISE_HERE __builtin_return_address(0)
#define TILEWISE_ACCESSES(bytes)                                                                         \
  void __tsan_read##bytes(void* at) { accessed(at, bytes, {}, TILEWISE_HERE); }                          \
  void __tsan_write##bytes(void* at) { accessed(at, bytes, {.writes = true}, TILEWISE_HERE); }           \
  void __tsan_unaligned_read##bytes(void* at) { accessed(at, bytes, {}, TILEWISE_HERE); }                \
  void __tsan_unaligned_write##bytes(void* at) { accessed(at, bytes, {.writes = true}, TILEWISE_HERE); } \
  void __tsan_volatile_read##bytes(void* at) { atomic_access<false, true>(at, bytes, TILEWISE_HERE); }   \
  void __tsan_volatile_write##bytes(void* at) { atomic_access<true, false>(at, bytes, TILEWISE_HERE); }

#define TILEWISE_FETCH(bits, T, name)                                       \
  T __tsan_atomic##bits##_fetch_##name(volatile T* at, T value, int) {      \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE); \
    return __atomic_fetch_##name(at, value, __ATOMIC_SEQ_CST);              \
  }
#define TILEWISE_ATOMICS(bits, T)                                                                       \
  T __tsan_atomic##bits##_load(const volatile T* at, int) {                                             \
    atomic_access<false, true>(const_cast<const T*>(at), bits / 8, TILEWISE_HERE);                      \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                     \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int) {                                      \
    atomic_access<true, false>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                            \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                     \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int) {                                      \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                     \
  TILEWISE_FETCH(bits, T, add)                                                                          \
  TILEWISE_FETCH(bits, T, sub)                                                                          \
  TILEWISE_FETCH(bits, T, and)                                                                          \
  TILEWISE_FETCH(bits, T, or)                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int, int) {   \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                     \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int, int) {     \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, long bytes) {
  accessed(at, static_cast<std::size_t>(bytes), {}, TILEWISE_HERE);
}
void __tsan_write_range(void* at, long bytes) {
  accessed(at, static_cast<std::size_t>(bytes), {.writes = true}, TILEWISE_HERE);
}
void __tsan_atomic_thread_fence(int) {}
TILEWISE_ACCESSES(1)
TILEWISE_ACCESSES(2)
TILEWISE_ACCESSES(4)
TILEWISE_ACCESSES(8)
TILEWISE_ACCESSES(16)
TILEWISE_ATOMICS(8, std::uint8_t)
TILEWISE_ATOMICS(16, std::uint16_t)
TILEWISE_ATOMICS(32, std::uint32_t)
TILEWISE_ATOMICS(64, std::uint64_t)

}  // extern "C"
