#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

template <typename T>
inline T* in_memory(T* address) {
  return address;
}
inline int opaque(int x) { return x; }
inline std::int64_t opaque(std::int64_t x) { return x; }
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline std::int64_t uniform(std::int64_t x) { return __shfl_sync(~0u, x, 0); }
template <typename T>
inline T* uniform(T* x) {
  return reinterpret_cast<T*>(uniform(reinterpret_cast<std::int64_t>(x)));
}

}  // namespace tilewise::cuda
