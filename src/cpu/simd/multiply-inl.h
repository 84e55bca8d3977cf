// The micro-kernel of all products of f32: C[m][n] (+)= Σ_k A(m, k)·B[k][n], where elements of A are
// broadcast and rows of B are vectors. A may be row-major or column-major and is not packed.

#if defined(TILEWISE_CPU_SIMD_MULTIPLY_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_MULTIPLY_INL_H
#undef TILEWISE_CPU_SIMD_MULTIPLY_INL_H
#else
#define TILEWISE_CPU_SIMD_MULTIPLY_INL_H
#endif

#include <algorithm>

#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

// The register file holds the accumulators (M rows of W vectors), W vectors of B and one element of A.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM
inline constexpr int registers = 32;
#else
inline constexpr int registers = 16;
#endif
inline constexpr int max_vectors = registers == 32 ? 4 : 3;  // the largest W
constexpr int rows_for(int vectors) {
  constexpr int wide[] = {0, 12, 12, 8, 6};
  constexpr int narrow[] = {0, 6, 6, 4, 0};
  return registers == 32 ? wide[vectors] : narrow[vectors];
}

enum class ALayout { rows, columns };   // A(m, k) at a[m·lda + k], or at a[k·lda + m]
enum class Into { set, add, rescale };  // C = A·B, C += A·B, C = C·factor[n] + A·B

/// The operands of a product; strides in elements.
struct Product {
  const float* a;
  std::int64_t lda;
  const float* b;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  int depth;                      // extent of K
  const float* factor = nullptr;  // [n], for Into::rescale
};

/// The elements of A and B are f32. Bf16Pairs in pairs-inl.h is the alternative.
struct F32Elements {
  static HWY_INLINE VF multiply_add(VF a, VF b, VF sum) { return hn::MulAdd(a, b, sum); }
};

template <int M, int W, ALayout layout, Into into, typename Element = F32Elements>
HWY_INLINE void multiply_block(const Product& p, int row, int column) {
  const float* HWY_RESTRICT a = p.a + (layout == ALayout::rows ? row * p.lda : row);
  const float* HWY_RESTRICT b = p.b + column;
  const std::int64_t lda = p.lda;
  const std::int64_t ldb = p.ldb;
  VF sum[M][W];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) sum[m][w] = hn::Zero(F());
  }
  for (int k = 0; k < p.depth; ++k) {
    VF b_row[W];
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) b_row[w] = load(b + w * lanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const VF element = set(layout == ALayout::rows ? a[m * lda] : a[m]);
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) sum[m][w] = Element::multiply_add(element, b_row[w], sum[m][w]);
    }
    a += layout == ALayout::rows ? 1 : lda;
    b += ldb;
  }
  float* HWY_RESTRICT c = p.c + row * p.ldc + column;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) {
      float* to = c + m * p.ldc + w * lanes;
      if constexpr (into == Into::add) sum[m][w] = hn::Add(load(to), sum[m][w]);
      if constexpr (into == Into::rescale) {
        sum[m][w] = hn::MulAdd(load(to), load(p.factor + column + w * lanes), sum[m][w]);
      }
      store(sum[m][w], to);
    }
  }
}

// Computes W vectors of columns for all rows: in the largest blocks of rows first, then in smaller ones.
template <int W, ALayout layout, Into into>
void multiply_columns(const Product& p, int rows, int column) {
  constexpr int M = rows_for(W);
  int row = 0;
  for (; row + M <= rows; row += M) multiply_block<M, W, layout, into>(p, row, column);
  if constexpr (M > 8) {
    for (; row + 8 <= rows; row += 8) multiply_block<8, W, layout, into>(p, row, column);
  }
  if constexpr (M > 4) {
    for (; row + 4 <= rows; row += 4) multiply_block<4, W, layout, into>(p, row, column);
  }
  for (; row + 2 <= rows; row += 2) multiply_block<2, W, layout, into>(p, row, column);
  for (; row < rows; ++row) multiply_block<1, W, layout, into>(p, row, column);
}

/// Computes C [rows, columns]. `columns` is a multiple of `lanes`.
template <ALayout layout, Into into>
void multiply(const Product& p, int rows, int columns) {
  int vectors = columns / lanes;
  int column = 0;
  while (vectors > 0) {
    // Take the largest width, but never leave a single vector over, which uses registers worst: five vectors
    // are computed as three and two.
    int width = std::min(vectors, max_vectors);
    if (vectors == max_vectors + 1) width = (max_vectors + 2) / 2;
    switch (width) {
      case 1: multiply_columns<1, layout, into>(p, rows, column); break;
      case 2: multiply_columns<2, layout, into>(p, rows, column); break;
      case 3: multiply_columns<3, layout, into>(p, rows, column); break;
      default:
        if constexpr (max_vectors == 4) multiply_columns<4, layout, into>(p, rows, column);
        break;
    }
    vectors -= width;
    column += width * lanes;
  }
}

// Longer sums over K are computed in chunks of this length: that bounds their rounding error and keeps the
// chunk of B in cache.
inline constexpr int sum_chunk = 128;
/// The chunk length for calls with a single query. For those PyTorch computes with vectors along K, so its
/// sums are short, and these must be as accurate. The additional loads cost nothing, since most lanes are
/// idle.
inline constexpr int single_query_sum_chunk = 32;

/// C = A·B with a row-major A, for any depth.
inline void multiply_in_chunks(Product p, int rows, int columns, std::int64_t queries) {
  const int chunk = queries == 1 ? single_query_sum_chunk : sum_chunk;
  const int depth = p.depth;
  p.depth = std::min(depth, chunk);
  multiply<ALayout::rows, Into::set>(p, rows, columns);
  for (int k = chunk; k < depth; k += chunk) {
    Product next = p;
    next.a += k;
    next.b += k * p.ldb;
    next.depth = std::min(depth - k, chunk);
    multiply<ALayout::rows, Into::add>(next, rows, columns);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
