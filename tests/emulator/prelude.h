#pragma once

// The keywords and built-in functions of CUDA, which nvcc provides without a header. Included before anything
// else when a .cu file is compiled as C++ for the emulator.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"
#include "races/races.h"

#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __noinline__
#undef __constant__
#define __shared__ static thread_local
#define __constant__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
// Defined after the inclusion of CUDA's headers, which would otherwise take this for a pass of nvcc. 9.0
// means sm_90a.
#define __CUDA_ARCH__ (10 * TILEWISE_EMULATED_ARCHITECTURE)
#if TILEWISE_EMULATED_ARCHITECTURE == 90
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#endif

#define threadIdx (::tilewise::emulator::self->index)
#define blockIdx (::tilewise::emulator::block_index)
#define blockDim (::tilewise::emulator::block_extent)
#define gridDim (::tilewise::emulator::grid_extent)

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }
inline unsigned max(unsigned a, int b) { return std::max(a, static_cast<unsigned>(b)); }
inline std::int64_t min(std::int64_t a, int b) { return std::min(a, std::int64_t{b}); }
inline std::int64_t min(int a, std::int64_t b) { return std::min(std::int64_t{a}, b); }
inline std::int64_t max(std::int64_t a, int b) { return std::max(a, std::int64_t{b}); }
inline std::int64_t max(int a, std::int64_t b) { return std::max(std::int64_t{a}, b); }

// Conversions and bit operations.
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int n = 0; n < 32; ++n) y |= (x >> n & 1u) << (31 - n);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(std::uint64_t{a} * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(std::int64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const std::uint64_t both = std::uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned which = select >> (4 * n) & 7u;
    auto byte = static_cast<unsigned>(both >> (8 * which) & 0xFF);
    if (select >> (4 * n) & 8u) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * n);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) << (by & 31) >> 32);
}
inline int __vimax3_s32(int a, int b, int c) { return std::max({a, b, c}); }
inline int __vimin3_s32(int a, int b, int c) { return std::min({a, b, c}); }
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int n = 0; n < 32; n += 8) result |= ((a >> n & 0xFF) != (b >> n & 0xFF) ? 0xFFu : 0u) << n;
  return result;
}

// Arithmetic without fusion of operations. The sources are compiled without contraction.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __saturatef(float a) { return std::min(1.0f, std::max(0.0f, a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __float2int_rd(float a) { return static_cast<int>(std::floor(a)); }
inline int __float2int_rz(float a) { return static_cast<int>(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrtf(float a) { return static_cast<float>(1 / std::sqrt(static_cast<double>(a))); }
inline double rsqrt(double a) { return 1 / std::sqrt(a); }

// Memory.
template <typename T>
inline T __ldg(const T* from) {
  return *from;
}
template <typename T>
inline T __ldcg(const T* from) {
  return *static_cast<const volatile T*>(from);
}
inline float4 __ldcg(const float4* from) { return *from; }
inline uint4 __ldcg(const uint4* from) { return *from; }
inline float2 __ldcg(const float2* from) { return *from; }
template <typename T>
inline T __ldcs(const T* from) {
  return *from;
}
template <typename T>
inline void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
inline void __stcg(T* to, T value) {
  *to = value;
}
inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  tilewise::emulator::races::fence_device();
}
inline void __threadfence_block() {}
inline std::size_t __cvta_generic_to_shared(const void* p) { return tilewise::emulator::shared_address(p); }
[[noreturn]] inline void __trap() { tilewise::emulator::fail("__trap"); }

template <typename T, typename Change>
inline T emulated_atomic(T* address, const Change& change) {
  std::atomic_ref<T> word(*address);
  T before = word.load();
  while (!word.compare_exchange_weak(before, change(before))) {
  }
  return before;
}
template <typename T>
inline T atomicAdd(T* address, std::type_identity_t<T> value) {
  return emulated_atomic(address, [=](T now) { return static_cast<T>(now + value); });
}
template <typename T>
inline T atomicMax(T* address, std::type_identity_t<T> value) {
  return emulated_atomic(address, [=](T now) { return std::max(now, value); });
}
template <typename T>
inline T atomicMin(T* address, std::type_identity_t<T> value) {
  return emulated_atomic(address, [=](T now) { return std::min(now, value); });
}
template <typename T>
inline T atomicOr(T* address, std::type_identity_t<T> value) {
  return emulated_atomic(address, [=](T now) { return now | value; });
}
template <typename T>
inline T atomicExch(T* address, std::type_identity_t<T> value) {
  return emulated_atomic(address, [=](T) { return value; });
}
template <typename T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(expected, value);
  return expected;
}

// Synchronisation and exchange between the lanes of a warp and the threads of a block.
inline void __syncthreads() { tilewise::emulator::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) { tilewise::emulator::sync_lanes(mask); }
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = tilewise::emulator::self->lane;
  return tilewise::emulator::exchange(mask, value)[(lane & ~(width - 1)) | (from & (width - 1))];
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  const int lane = tilewise::emulator::self->lane, from = lane ^ with;
  const auto all = tilewise::emulator::exchange(mask, value);
  return (from & ~(width - 1)) > (lane & ~(width - 1)) ? value : all[from];
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = tilewise::emulator::self->lane;
  const auto all = tilewise::emulator::exchange(mask, value);
  return (lane & (width - 1)) < static_cast<int>(by) ? value : all[lane - static_cast<int>(by)];
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = tilewise::emulator::self->lane;
  const auto all = tilewise::emulator::exchange(mask, value);
  return (lane & (width - 1)) + static_cast<int>(by) >= width ? value : all[lane + static_cast<int>(by)];
}
template <typename T, typename Join>
inline T emulated_reduction(unsigned mask, T value, const Join& join) {
  const auto all = tilewise::emulator::exchange(mask, value);
  bool first = true;
  T result{};
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    result = first ? all[lane] : join(result, all[lane]);
    first = false;
  }
  return result;
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto bit = static_cast<unsigned>(predicate != 0) << tilewise::emulator::self->lane;
  return emulated_reduction(mask, bit, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <typename T, typename Join>
inline T emulated_redux(unsigned mask, T value, const Join& join) {
  if (__CUDA_ARCH__ < 800) tilewise::emulator::fail("redux before 8.0");
  return emulated_reduction(mask, value, join);
}
template <typename T>
inline T __reduce_add_sync(unsigned mask, T value) {
  return emulated_redux(mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T value) {
  return emulated_redux(mask, value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T value) {
  return emulated_redux(mask, value, [](T a, T b) { return std::min(a, b); });
}
template <typename T>
inline T __reduce_or_sync(unsigned mask, T value) {
  return emulated_redux(mask, value, [](T a, T b) { return a | b; });
}

template <typename... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
