#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

template <int number, int threads>
inline void sync_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  emulator::sync_named(number, threads);
}
template <int number, int threads>
inline void arrive_some() {
  static_assert(number > 0 && number < 16 && threads % 32 == 0);
  emulator::arrive_named(number, threads);
}
inline void sync_with_arrivals(int number) { emulator::sync_named(number, 256); }
inline void arrive_for_sync(int number) { emulator::arrive_named(number, 256); }

}  // namespace tilewise::cuda
