// Matrices into panels that the micro-kernels read: `width` rows of the matrix side by side, one element of
// each for every column, as f32.

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

/// Columns turned at a time: their staging stays in the L1.
inline constexpr int pack_columns = 256;
/// Floats of staging that packing needs.
inline constexpr std::int64_t pack_staging = turn_staging(pack_columns);
/// Floats that packing may write past a panel's end.
inline constexpr std::int64_t pack_slack = lanes;

/// panel[c·width + r] = element (first_row + r, first_column + c) for `columns` columns; lanes past the last
/// of the matrix's rows hold other rows' elements, which are finite where those are and are not used. Width
/// is a multiple of the vector, or less than one: then what a vector writes past a column is overwritten by
/// the next.
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
    // Read where they lie, columns are four at a time: a cache line of a row four times in a row. That is
    // faster than a pass through staging (by 5 to 15 % of a product), also where rows are a power of two
    // apart.
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
