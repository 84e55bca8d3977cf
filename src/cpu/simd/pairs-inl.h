// Products of bf16 by the instruction for them, where there is one: a pair of neighbours along K takes the
// place of an f32, and two products are added at a time. Everything else about a product stays as it is.

#if defined(TILEWISE_CPU_SIMD_PAIRS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_PAIRS_INL_H
#undef TILEWISE_CPU_SIMD_PAIRS_INL_H
#else
#define TILEWISE_CPU_SIMD_PAIRS_INL_H
#endif

#include "cpu/simd/multiply-inl.h"
#include "gemm/call.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3 && defined(__x86_64__)
struct Pairs {
  // AVX-512 BF16 is no part of the target, which all machines with AVX-512 share: so the instruction is
  // written out, and reached only where the CPU has it.
  static HWY_INLINE VF add(VF a, VF b, VF sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
  static bool present() { return __builtin_cpu_supports("avx512bf16"); }
};
#else
struct Pairs : Elements {
  static bool present() { return false; }
};
#endif

/// A matrix of bf16 by rows as one of f32 that holds its pairs.
inline Matrix paired(const Matrix& matrix) {
  Matrix pairs = matrix;
  pairs.dtype = DType::f32;
  pairs.columns /= 2;
  pairs.stride_row /= 2;
  return pairs;
}

/// Whether all of the call's factors can be seen so.
inline bool can_pair(const GemmCall& call) {
  const GemmProblem& problem = call.problem;
  const auto even = [](const Matrix& matrix) { return matrix.stride_row % 2 == 0; };
  return problem.dtype == DType::bf16 && problem.k % 2 == 0 && problem.k > 0 && problem.a_by_rows &&
         problem.b_by_rows && even(call.a) && even(call.b) && (!problem.gated || even(call.gate)) &&
         Pairs::present();
}

inline GemmCall paired(const GemmCall& call) {
  GemmCall pairs = call;
  pairs.problem.k /= 2;
  pairs.a = paired(call.a);
  pairs.b = paired(call.b);
  if (call.problem.gated) pairs.gate = paired(call.gate);
  return pairs;
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
