#include <array>
#include <string>

#include "attention/kernel.h"
#include "cpu/simd/passes.h"

namespace tilewise {
namespace cpu::simd {
namespace {

// What one SIMD level offers; compiled once for each.
struct Level {
  std::string_view name;
  bool (*present)();  // whether this machine has it
  std::size_t (*forward_workspace)(const AttentionCall&, const Context&);
  std::size_t (*backward_workspace)(const AttentionCall&, const Context&);
  void (*forward)(const AttentionCall&, const Context&);
  void (*backward)(const AttentionCall&, const Context&);
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}
bool has_sse4() { return __builtin_cpu_supports("sse4.2"); }
#else
bool has_baseline() { return true; }
#endif

// Best first.
constexpr std::array levels = {
#if defined(__x86_64__)
    Level{"avx512", has_avx512, N_AVX3::forward_workspace, N_AVX3::backward_workspace, N_AVX3::forward,
          N_AVX3::backward},
    Level{"avx2", has_avx2, N_AVX2::forward_workspace, N_AVX2::backward_workspace, N_AVX2::forward,
          N_AVX2::backward},
    Level{"sse4", has_sse4, N_SSE4::forward_workspace, N_SSE4::backward_workspace, N_SSE4::forward,
          N_SSE4::backward},
#else
    Level{HWY_ARCH_ARM ? "neon" : "baseline", has_baseline, HWY_NAMESPACE::forward_workspace,
          HWY_NAMESPACE::backward_workspace, HWY_NAMESPACE::forward, HWY_NAMESPACE::backward},
#endif
};

const Level* find_level(std::string_view name) {
  for (const Level& candidate : levels) {
    if ((name.empty() || name == candidate.name) && candidate.present()) return &candidate;
  }
  return nullptr;
}

std::string supports(const AttentionProblem& problem) {
  if (problem.device.type != Device::Type::cpu) return "runs on the CPU alone";
  if (find_level({}) == nullptr) return "this CPU has none of its vector instructions";
  if (problem.dtype == DType::f64) return "takes f32, f16 and bf16, not f64";
  if (problem.layout == Layout::paged && problem.pass == Pass::backward) return "paged keys have no backward";
  return {};
}

std::size_t workspace(const AttentionCall& call, const Context& context) {
  const Level& level = *find_level(context.simd_level);
  return call.problem.pass == Pass::forward ? level.forward_workspace(call, context)
                                            : level.backward_workspace(call, context);
}

void launch(const AttentionCall& call, const Context& context) {
  const Level& level = *find_level(context.simd_level);
  (call.problem.pass == Pass::forward ? level.forward : level.backward)(call, context);
}

}  // namespace
}  // namespace cpu::simd

constinit const AttentionKernel cpu::simd_attention = {.name = "simd",
                                                       .supports = cpu::simd::supports,
                                                       .workspace = cpu::simd::workspace,
                                                       .launch = cpu::simd::launch};

std::vector<std::string_view> simd_levels() {
  std::vector<std::string_view> names;
  for (const cpu::simd::Level& level : cpu::simd::levels) {
    if (level.present()) names.push_back(level.name);
  }
  return names;
}

}  // namespace tilewise
