// Products of bf16 with the CPU's dot-product instruction, where it has one: two neighbours along K take the
// place of one f32, and one instruction adds two products. The rest of a product is the same as for f32.

#if defined(TILEWISE_CPU_SIMD_PAIRS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_PAIRS_INL_H
#undef TILEWISE_CPU_SIMD_PAIRS_INL_H
#else
#define TILEWISE_CPU_SIMD_PAIRS_INL_H
#endif

#include <cstring>
#include <type_traits>

#include "cpu/simd/multiply-inl.h"
#include "cpu/simd/pack-inl.h"
#include "gemm/call.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3 && defined(__x86_64__)
struct Bf16Pairs {
  // The target is compiled for all machines with AVX-512, and not all of them have AVX-512 BF16. So the
  // instruction is inline assembly, which runs only where present() is true.
  static HWY_INLINE VF multiply_add(VF a, VF b, VF sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
  static bool present() { return __builtin_cpu_supports("avx512bf16"); }
};
#else
struct Bf16Pairs : F32Elements {
  static bool present() { return false; }
};
#endif

/// A view of a bf16 matrix in which two columns count as one. A row-major matrix becomes one of f32, whose
/// elements are the pairs. In a column-major matrix the two elements of a pair are not neighbours, and
/// pack_elements joins them.
inline Matrix paired(const Matrix& matrix) {
  Matrix pairs = matrix;
  pairs.columns /= 2;
  if (!matrix.by_rows()) return pairs;
  pairs.dtype = DType::f32;
  pairs.stride_row /= 2;
  return pairs;
}

/// Whether paired() can view all operands of the call, and the CPU has the instruction.
inline bool can_pair(const GemmCall& call) {
  const GemmProblem& problem = call.problem;
  const auto fits = [](const Matrix& matrix) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(matrix.data) % sizeof(float) == 0;
    return !matrix.by_rows() || (aligned && matrix.stride_row % 2 == 0);
  };
  return problem.dtype == DType::bf16 && problem.k % 2 == 0 && problem.k > 0 && fits(call.a) &&
         fits(call.b) && (!problem.gated || fits(call.gate)) && Bf16Pairs::present();
}

/// pack_panel for either kind of elements. For Bf16Pairs, columns count pairs.
template <typename Element>
void pack_elements(float* panel, int width, const Matrix& matrix, std::int64_t first_row,
                   std::int64_t first_column, std::int64_t columns, float* staging) {
  if (std::is_same_v<Element, F32Elements> || matrix.by_rows()) {
    return pack_panel(panel, width, matrix, first_row, first_column, columns, staging);
  }
  const auto rows = static_cast<int>(std::min<std::int64_t>(width, matrix.rows - first_row));
  for (std::int64_t c = 0; c < columns; ++c) {
    const auto* low = reinterpret_cast<const std::uint16_t*>(matrix.at(first_row, 2 * (first_column + c)));
    const auto* high = low + matrix.stride_column;
    float* to = panel + c * width;
    for (int r = 0; r < rows; ++r) {
      const std::uint32_t pair = low[r] | static_cast<std::uint32_t>(high[r]) << 16;
      std::memcpy(to + r, &pair, sizeof pair);
    }
    std::fill(to + rows, to + width, 0.0f);
  }
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
