#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "cpu/simd/passes.h"

namespace tilewise::cpu::simd {

// SIMD levels, best first: functions are compiled once for each.

#if defined(__x86_64__)
inline constexpr std::size_t level_count = 3;  // avx512, avx2, sse4
#define TILEWISE_EACH_LEVEL(function) {N_AVX3::function, N_AVX2::function, N_SSE4::function}
#else
inline constexpr std::size_t level_count = 1;
#define TILEWISE_EACH_LEVEL(function) {HWY_NAMESPACE::function}
#endif

/// Whether this machine has any of them.
bool has_level();

/// Index of the level of that name, which this machine has, or of the best for an empty one.
std::size_t level_index(std::string_view name);

/// A function's versions, one a level: `PerLevel<void(const GemmCall&, const Context&)>`.
template <typename Function>
using PerLevel = std::array<Function*, level_count>;

/// That of the level the context asks for.
template <typename Function>
Function* at_level(const PerLevel<Function>& versions, const Context& context) {
  return versions[level_index(context.simd_level)];
}

}  // namespace tilewise::cpu::simd
