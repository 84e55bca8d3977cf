#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

template <typename T>
inline T load_shared(std::uint32_t address_smem) {
  if (address_smem % alignof(T) != 0) emulator::fail("a load from an odd address of shared memory");
  return *reinterpret_cast<const T*>(emulator::shared_pointer(address_smem, sizeof(T)));
}
inline std::uint32_t load_byte(std::uint32_t address_smem) { return load_shared<std::uint8_t>(address_smem); }
inline float load_float(std::uint32_t address_smem) { return load_shared<float>(address_smem); }
inline std::uint32_t load_two_bytes(std::uint32_t address_smem) {
  return load_shared<std::uint16_t>(address_smem);
}
inline float2 load_two_floats(std::uint32_t address_smem) { return load_shared<float2>(address_smem); }
inline void pin_address(std::uint32_t&) {}
inline uint4 load_pinned_16(std::uint32_t address_smem) { return load_shared<uint4>(address_smem); }
inline float2 load_pinned_8(std::uint32_t address_smem) { return load_shared<float2>(address_smem); }
inline float load_pinned_4(std::uint32_t address_smem) { return load_shared<float>(address_smem); }

}  // namespace tilewise::cuda
