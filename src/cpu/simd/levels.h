#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "cpu/simd/passes.h"

namespace tilewise::cpu::simd {

// SIMD levels, best first. Every kernel is compiled once for each level.

#if defined(__x86_64__)
inline constexpr std::size_t level_count = 3;  // avx512, avx2, sse4
#define TILEWISE_EACH_LEVEL(function) {N_AVX3::function, N_AVX2::function, N_SSE4::function}
#else
inline constexpr std::size_t level_count = 1;
#define TILEWISE_EACH_LEVEL(function) {HWY_NAMESPACE::function}
#endif

/// Whether this machine has any of the levels.
bool has_level();

/// The index of the named level, or of the best level for an empty name; level_count if this machine has
/// none.
std::size_t level_index(std::string_view name);

/// The versions of a function, one per level: `PerLevel<void(const GemmCall&, const Context&)>`.
template <typename Function>
using PerLevel = std::array<Function*, level_count>;

/// The version for the level that the context asks for.
template <typename Function>
Function* at_level(const PerLevel<Function>& versions, const Context& context) {
  return versions[level_index(context.simd_level)];
}

}  // namespace tilewise::cpu::simd
