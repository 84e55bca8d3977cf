#pragma once

#include <array>
#include <cstdint>

namespace tilewise {

// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as
// easy as 1, 2, 3", SC 2011). It is a pure function of a 128-bit counter and a 64-bit key.

struct PhiloxKey {
  std::uint32_t low;
  std::uint32_t high;
};

// Scalars and not arrays, since device code can use the value of a host constant but not its address.
inline constexpr std::uint32_t philox_multiplier0 = 0xD2511F53u;
inline constexpr std::uint32_t philox_multiplier1 = 0xCD9E8D57u;
inline constexpr std::uint32_t philox_weyl0 = 0x9E3779B9u;
inline constexpr std::uint32_t philox_weyl1 = 0xBB67AE85u;
inline constexpr int philox_rounds = 10;

constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, PhiloxKey key) {
  for (int round = 0; round < philox_rounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{philox_multiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{philox_multiplier1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key.low,
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key.high,
               static_cast<std::uint32_t>(product0)};
    key.low += philox_weyl0;
    key.high += philox_weyl1;
  }
  return counter;
}

}  // namespace tilewise
