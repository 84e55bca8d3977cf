#pragma once

#include <cstdint>

#include "emulator.h"

namespace tilewise::cuda {

using TileDescriptor = std::uint64_t;

inline TileDescriptor describe_tile(std::uint32_t address_smem, int panel_bytes) {
  constexpr TileDescriptor swizzle_128 = TileDescriptor{1} << 62;
  constexpr TileDescriptor eight_rows = TileDescriptor{1024 / 16} << 32;
  return swizzle_128 | eight_rows | static_cast<TileDescriptor>(panel_bytes / 16) << 16 |
         (address_smem & 0x3FFFF) >> 4;
}
inline void fence_products() {}
inline void commit_products() { emulator::commit_products(); }
template <int groups>
inline void wait_products() {
  emulator::wait_products(groups);
}
template <int n>
inline void pin(float (&)[n]) {}
template <int m, int n>
inline void pin(std::uint32_t (&)[m][n]) {}

template <int n>
inline void forget(float (&)[n]) {}

template <typename T, int n>
struct WarpgroupProduct {
  template <int turned_a = 0, int turned_b = 0>
  static inline void from_shared(float (&c)[n / 2], TileDescriptor a, TileDescriptor b, bool add) {
    emulator::multiply({.c = c,
                        .a_tile = a,
                        .b_tile = b,
                        .n = n,
                        .turned_a = turned_a != 0,
                        .turned_b = turned_b != 0,
                        .add = add,
                        .bf16 = std::is_same_v<T, __nv_bfloat16>});
  }
  template <int turned_b = 1>
  static inline void from_registers(float (&c)[n / 2], const std::uint32_t (&a)[4], TileDescriptor b,
                                    bool add) {
    emulator::multiply({.c = c,
                        .a = {a[0], a[1], a[2], a[3]},
                        .b_tile = b,
                        .n = n,
                        .a_in_registers = true,
                        .turned_b = turned_b != 0,
                        .add = add,
                        .bf16 = std::is_same_v<T, __nv_bfloat16>});
  }
};

}  // namespace tilewise::cuda
