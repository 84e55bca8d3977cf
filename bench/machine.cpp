#include "machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>

#include "tilewise/context.h"

namespace tilewise::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A burst computes s ← s·scale + shift on many accumulators. There are enough of them to hide the latency of
// the multiply-add (4 or 5 cycles on two to four ports), and few enough to stay in registers. The values
// converge to 1 and never overflow or become subnormal. Each accumulator has another initial value, so that
// the compiler cannot compute one from another.
struct Burst {
  const char* instructions;
  int flops_per_step;  // 2 · lanes · accumulators
  float (*run)(std::int64_t steps);
};

constexpr float scale = 0.999f;
constexpr float shift = 0.001f;
constexpr float first = 0.5f;
constexpr float spacing = 0.01f;  // of the initial values

#if defined(__x86_64__)

constexpr int avx512_accumulators = 24;
__attribute__((target("avx512f"))) float avx512_burst(std::int64_t steps) {
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512 shifts = _mm512_set1_ps(shift);
  __m512 sums[avx512_accumulators];
  for (int n = 0; n < avx512_accumulators; ++n)
    sums[n] = _mm512_set1_ps(first + spacing * static_cast<float>(n));
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, scales, shifts);
  }
  __m512 total = _mm512_setzero_ps();
  for (const __m512& sum : sums) total = _mm512_add_ps(total, sum);
  return _mm512_cvtss_f32(total);
}

constexpr int avx2_accumulators = 12;
__attribute__((target("avx2,fma"))) float avx2_burst(std::int64_t steps) {
  const __m256 scales = _mm256_set1_ps(scale);
  const __m256 shifts = _mm256_set1_ps(shift);
  __m256 sums[avx2_accumulators];
  for (int n = 0; n < avx2_accumulators; ++n)
    sums[n] = _mm256_set1_ps(first + spacing * static_cast<float>(n));
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, scales, shifts);
  }
  __m256 total = _mm256_setzero_ps();
  for (const __m256& sum : sums) total = _mm256_add_ps(total, sum);
  return _mm256_cvtss_f32(total);
}

constexpr int sse2_accumulators = 12;
float sse2_burst(std::int64_t steps) {
  const __m128 scales = _mm_set1_ps(scale);
  const __m128 shifts = _mm_set1_ps(shift);
  __m128 sums[sse2_accumulators];
  for (int n = 0; n < sse2_accumulators; ++n) sums[n] = _mm_set1_ps(first + spacing * static_cast<float>(n));
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (__m128& sum : sums) sum = _mm_add_ps(_mm_mul_ps(sum, scales), shifts);
  }
  __m128 total = _mm_setzero_ps();
  for (const __m128& sum : sums) total = _mm_add_ps(total, sum);
  return _mm_cvtss_f32(total);
}

Burst best_burst() {
  if (__builtin_cpu_supports("avx512f")) return {"avx512f", 2 * 16 * avx512_accumulators, avx512_burst};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"avx2 fma", 2 * 8 * avx2_accumulators, avx2_burst};
  }
  return {"sse2", 2 * 4 * sse2_accumulators, sse2_burst};
}

#elif defined(__aarch64__)

constexpr int neon_accumulators = 24;
float neon_burst(std::int64_t steps) {
  const float32x4_t scales = vdupq_n_f32(scale);
  const float32x4_t shifts = vdupq_n_f32(shift);
  float32x4_t sums[neon_accumulators];
  for (int n = 0; n < neon_accumulators; ++n) sums[n] = vdupq_n_f32(first + spacing * static_cast<float>(n));
  for (std::int64_t step = 0; step < steps; ++step) {
    // The instruction adds to its destination, so here the sum is the addend. It grows by scale·shift per
    // step.
#pragma GCC unroll 24
    for (float32x4_t& sum : sums) sum = vfmaq_f32(sum, scales, shifts);
  }
  float32x4_t total = vdupq_n_f32(0);
  for (const float32x4_t& sum : sums) total = vaddq_f32(total, sum);
  return vaddvq_f32(total);
}

Burst best_burst() { return {"neon", 2 * 4 * neon_accumulators, neon_burst}; }

#else

constexpr int scalar_accumulators = 12;
float scalar_burst(std::int64_t steps) {
  float sums[scalar_accumulators];
  for (int n = 0; n < scalar_accumulators; ++n) sums[n] = first + spacing * static_cast<float>(n);
  for (std::int64_t step = 0; step < steps; ++step) {
    for (float& sum : sums) sum = sum * scale + shift;
  }
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

Burst best_burst() { return {"scalar", 2 * scalar_accumulators, scalar_burst}; }

#endif

// Receives the results of bursts, so that the compiler cannot remove them.
std::atomic<float> sink;

}  // namespace

double fma_peak_gflops(int threads) {
  // A burst of 2^28 FLOPs takes some 3 ms. That is long compared with the start of a parallel region, and
  // short compared with disturbances on a shared machine, so the best of a dozen bursts is undisturbed.
  constexpr double flops_per_thread = 0x1p28;
  constexpr int bursts = 12;
  const Burst burst = best_burst();
  const auto steps = static_cast<std::int64_t>(flops_per_thread / burst.flops_per_step);
  const ParallelFor parallel_for = openmp_parallel_for(threads);
  double best = std::numeric_limits<double>::infinity();
  for (int n = 0; n < bursts; ++n) {
    const Clock::time_point start = Clock::now();
    parallel_for.run(threads, [&](std::int64_t) { sink = burst.run(steps); });
    best = std::min(best, seconds_since(start));
  }
  return static_cast<double>(steps) * burst.flops_per_step * threads / best * 1e-9;
}

std::string fma_instructions() { return best_burst().instructions; }

double copy_gbps(int threads) {
  constexpr std::size_t bytes = std::size_t{128} << 20;
  constexpr int copies = 5;
  const auto from = std::make_unique<std::byte[]>(bytes);
  const auto to = std::make_unique<std::byte[]>(bytes);
  const auto shares = static_cast<std::size_t>(threads);
  const ParallelFor parallel_for = openmp_parallel_for(threads);
  double best = std::numeric_limits<double>::infinity();
  for (int n = 0; n < copies; ++n) {
    // Not zeros, so that every page is allocated and is not the kernel's shared page of zeros.
    std::memset(from.get(), n + 1, bytes);
    const Clock::time_point start = Clock::now();
    parallel_for.run(threads, [&](std::int64_t index) {
      const std::size_t begin = bytes / shares * static_cast<std::size_t>(index);
      std::memcpy(to.get() + begin, from.get() + begin, bytes / shares);
    });
    best = std::min(best, seconds_since(start));
    sink = static_cast<float>(std::to_integer<int>(to[bytes / 2]));
  }
  return 2 * static_cast<double>(bytes / shares * shares) / best * 1e-9;
}

int hardware_threads() { return openmp_parallel_for().threads; }

std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return "aarch64";
#else
  return "unknown";
#endif
}

std::string compiler_name() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

}  // namespace tilewise::bench
