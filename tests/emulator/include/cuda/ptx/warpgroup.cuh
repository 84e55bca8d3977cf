#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

template <int registers>
inline void keep_registers() {
  emulator::set_registers(registers);
}
template <int registers>
inline void take_registers() {
  emulator::set_registers(registers);
}
inline int lane_now() { return emulator::self->lane; }
inline bool elected() { return emulator::self->lane == 0; }

}  // namespace tilewise::cuda
