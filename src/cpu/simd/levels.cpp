#include "cpu/simd/levels.h"

#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tilewise {
namespace cpu::simd {
namespace {

struct Level {
  std::string_view name;
  bool (*present)();  // whether this machine has it
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
// __builtin_cpu_supports of Clang 14 does not know F16C. CPUID is executed only once, since it is slow on
// virtual machines, which trap it.
bool has_f16c() {
  static const bool present = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return present;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         has_f16c();
}
bool has_sse4() { return __builtin_cpu_supports("sse4.2"); }
#else
bool has_baseline() { return true; }
#endif

constexpr std::array<Level, level_count> levels = {{
#if defined(__x86_64__)
    {"avx512", has_avx512},
    {"avx2", has_avx2},
    {"sse4", has_sse4},
#else
    {HWY_ARCH_ARM ? "neon" : "baseline", has_baseline},
#endif
}};

}  // namespace

std::size_t level_index(std::string_view name) {
  std::size_t index = 0;
  while (index < level_count && !((name.empty() || name == levels[index].name) && levels[index].present())) {
    ++index;
  }
  return index;
}

bool has_level() { return level_index({}) < level_count; }

}  // namespace cpu::simd

std::vector<std::string_view> simd_levels() {
  std::vector<std::string_view> names;
  for (const cpu::simd::Level& level : cpu::simd::levels) {
    if (level.present()) names.push_back(level.name);
  }
  return names;
}

}  // namespace tilewise
