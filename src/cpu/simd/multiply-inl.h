// Products of small matrices of f32, all of one form: C[m][n] (+)= Σ_k A(m, k)·B[k][n], where elements of A
// are broadcast and rows of B are vectors. A is read where it lies, by rows or by columns, so nothing is
// packed for it.

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

// Accumulators fill the register file: M rows of W vectors, W vectors of B and one element of A.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM
inline constexpr int registers = 32;
#else
inline constexpr int registers = 16;
#endif
inline constexpr int max_vectors = registers == 32 ? 4 : 3;  // widest W
constexpr int rows_for(int vectors) {
  constexpr int wide[] = {0, 12, 12, 8, 6};
  constexpr int narrow[] = {0, 6, 6, 4, 0};
  return registers == 32 ? wide[vectors] : narrow[vectors];
}

enum class ALayout { rows, columns };   // A(m, k) at a[m·lda + k], or at a[k·lda + m]
enum class Into { set, add, rescale };  // C = P, C += P, C = C·factor[n] + P

/// The operands of a product; strides in elements.
struct Product {
  const float* a;
  std::int64_t lda;
  const float* b;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  int depth;                      // extent of k
  const float* factor = nullptr;  // [n], for Into::rescale
};

/// What is added for an element of A and one of B: their product.
struct Elements {
  static HWY_INLINE VF add(VF a, VF b, VF sum) { return hn::MulAdd(a, b, sum); }
};

template <int M, int W, ALayout layout, Into into, typename Terms = Elements>
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
      for (int w = 0; w < W; ++w) sum[m][w] = Terms::add(element, b_row[w], sum[m][w]);
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

// All rows of W vectors' columns: whole blocks, then halves.
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

/// C [rows, columns] from A and B; `columns` is a multiple of `lanes`.
template <ALayout layout, Into into>
void multiply(const Product& p, int rows, int columns) {
  int vectors = columns / lanes;
  int column = 0;
  while (vectors > 0) {
    // Widest first, but five as three and two, and so on: a lone vector wastes the most.
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

// Sums longer than this are made in pieces: it keeps the error of long sums down and B's piece in cache.
inline constexpr int depth_piece = 128;
/// Of a lone query. PyTorch makes its products with vectors along the depth, whose sums are short; lanes are
/// idle here anyway.
inline constexpr int lone_depth_piece = 32;

/// C = A·B with A by rows, for any depth.
inline void multiply_deep(Product p, int rows, int columns, std::int64_t queries) {
  const int longest = queries == 1 ? lone_depth_piece : depth_piece;
  const int depth = p.depth;
  p.depth = std::min(depth, longest);
  multiply<ALayout::rows, Into::set>(p, rows, columns);
  for (int k = longest; k < depth; k += longest) {
    Product piece = p;
    piece.a += k;
    piece.b += k * p.ldb;
    piece.depth = std::min(depth - k, longest);
    multiply<ALayout::rows, Into::add>(piece, rows, columns);
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
