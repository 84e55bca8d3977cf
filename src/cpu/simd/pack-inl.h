// Packs matrices into the panels that micro-kernels read: `width` rows of the matrix, transposed, as f32.

#if defined(TILEWISE_CPU_SIMD_PACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_PACK_INL_H
#undef TILEWISE_CPU_SIMD_PACK_INL_H
#else
#define TILEWISE_CPU_SIMD_PACK_INL_H
#endif

#include <algorithm>

#include "core/matrix.h"
#include "cpu/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// Columns that are transposed at a time: their staging buffer stays in the L1.
inline constexpr int pack_columns = 256;
/// The size of the staging buffer, in floats.
inline constexpr std::int64_t pack_staging = transpose_staging(pack_columns);
/// Packing may write this many floats past the end of a panel.
inline constexpr std::int64_t pack_slack = lanes;

/// panel[c·width + r] = element (first_row + r, first_column + c) for `columns` columns. Where the matrix has
/// fewer than `width` rows left, the other lanes hold elements of another row or 0; their results are not
/// used. `width` is a multiple of a vector or less than one vector. If it is less, each vector store writes
/// past its column, and the next column overwrites that.
inline void pack_panel(float* panel, int width, const Matrix& matrix, std::int64_t first_row,
                       std::int64_t first_column, std::int64_t columns, float* staging) {
  const auto rows = static_cast<int>(std::min<std::int64_t>(width, matrix.rows - first_row));
  if (!matrix.by_rows()) {
    for (std::int64_t c = 0; c < columns; ++c) {
      float* to = panel + c * width;
      widen(to, matrix.at(first_row, first_column + c), matrix.dtype, rows, 1.0f);
      std::fill(to + rows, to + width, 0.0f);
    }
    return;
  }
  if (matrix.dtype == DType::f32) {
    // The rows are read without staging, four columns at a time, so that a cache line of a row is read four
    // times in a row. This is 5 to 15 % of a product faster than staging, also where the distance of the rows
    // is a power of two.
    for (int first = 0; first < width; first += lanes) {
      const float* from[lanes];
      for (int lane = 0; lane < lanes; ++lane) {
        const int row = std::min(first + lane, rows - 1);
        from[lane] = reinterpret_cast<const float*>(matrix.at(first_row + row, first_column));
      }
      for_each_column(from, static_cast<int>(columns), [&](int c, VF column) HWY_ATTR {
        store(column, panel + std::int64_t{c} * width + first);
      });
    }
    return;
  }
  for (std::int64_t c = 0; c < columns; c += pack_columns) {
    const auto count = static_cast<int>(std::min<std::int64_t>(pack_columns, columns - c));
    rows_to_panel(panel + c * width, width, count, matrix.dtype, 1.0f, staging, [&](int lane) {
      return matrix.at(first_row + std::min(lane, rows - 1), first_column + c);
    });
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
