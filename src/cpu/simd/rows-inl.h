// Rows of any type as f32, and sums over rows in a fixed order.

#if defined(TILEWISE_CPU_SIMD_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_ROWS_INL_H
#undef TILEWISE_CPU_SIMD_ROWS_INL_H
#else
#define TILEWISE_CPU_SIMD_ROWS_INL_H
#endif

#include <algorithm>

#include "core/load.h"
#include "core/matrix.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

/// to[0, count) = body(at), where at(row) loads the vector of a row's elements at the same columns. The last
/// elements are loaded into vectors that are padded with zeros. `to` may be one of the rows.
template <typename Body>
HWY_INLINE void map_row(std::int64_t count, float* to, const Body& body) {
  std::int64_t n = 0;
  for (; n + lanes <= count; n += lanes) {
    store(body([n](const float* row) HWY_ATTR { return load(row + n); }), to + n);
  }
  if (n == count) return;
  const auto rest = static_cast<int>(count - n);
  alignas(64) float last[lanes];
  const VF result = body([n, rest](const float* row) HWY_ATTR {
    alignas(64) float elements[lanes] = {};
    for (int i = 0; i < rest; ++i) elements[i] = row[n + i];
    return hn::Load(F(), elements);
  });
  hn::Store(result, F(), last);
  std::copy_n(last, rest, to + n);
}

/// Σ body(at) over `count` elements. body must be 0 where all rows are 0, since the last vector is padded
/// with zeros. Four independent sums: each has fewer terms, and additions overlap.
template <typename Body>
HWY_INLINE float sum_row(std::int64_t count, const Body& body) {
  VF sums[4] = {hn::Zero(F()), hn::Zero(F()), hn::Zero(F()), hn::Zero(F())};
  std::int64_t n = 0;
  for (; n + 4 * lanes <= count; n += 4 * lanes) {
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = n + i * lanes;
      sums[i] = hn::Add(sums[i], body([at](const float* row) HWY_ATTR { return load(row + at); }));
    }
  }
  for (; n < count; n += lanes) {
    const auto rest = static_cast<int>(std::min<std::int64_t>(lanes, count - n));
    sums[0] = hn::Add(sums[0], body([n, rest](const float* row) HWY_ATTR {
                        alignas(64) float elements[lanes] = {};
                        for (int i = 0; i < rest; ++i) elements[i] = row[n + i];
                        return hn::Load(F(), elements);
                      }));
  }
  const VF sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
  return hn::GetLane(hn::SumOfLanes(F(), sum));
}

/// The row as f32: a pointer into the matrix if it is f32, else to the row converted into `buffer`.
HWY_INLINE const float* row_as_f32(const Matrix& matrix, std::int64_t row, float* buffer) {
  std::byte* from = matrix.at(row, 0);
  if (matrix.dtype == DType::f32) return reinterpret_cast<const float*>(from);
  widen(buffer, from, matrix.dtype, static_cast<int>(matrix.columns), 1.0f);
  return buffer;
}

/// The memory into which the caller writes a row as f32: the matrix itself if it is f32, else `buffer`. After
/// that, store_row converts it.
HWY_INLINE float* row_to_fill(const Matrix& matrix, std::int64_t row, float* buffer) {
  return matrix.dtype == DType::f32 ? reinterpret_cast<float*>(matrix.at(row, 0)) : buffer;
}
HWY_INLINE void store_row(const Matrix& matrix, std::int64_t row, const float* filled) {
  if (matrix.dtype == DType::f32) return;
  narrow(matrix.at(row, 0), matrix.dtype, filled, static_cast<int>(matrix.columns));
}

/// Rows per task: enough work to outweigh the cost of a task.
constexpr std::int64_t rows_per_task(std::int64_t columns) {
  constexpr std::int64_t elements = 1 << 14;
  return std::max<std::int64_t>(1, elements / std::max<std::int64_t>(columns, 1));
}

/// The number of chunks of rows whose partial sums different threads compute, to be added in order. It
/// depends on the number of rows alone, so that the result does not depend on the threads.
constexpr std::int64_t row_chunks(std::int64_t rows) { return std::clamp<std::int64_t>(rows / 16, 1, 32); }

/// Adds the partial sums [count, columns] in order, and stores them in the type of `sums`.
inline void join_partial_sums(float* partial, std::int64_t count, std::int64_t columns, const Vector& sums) {
  if (sums.data == nullptr) return;
  for (std::int64_t chunk = 1; chunk < count; ++chunk) {
    const float* more = partial + chunk * columns;
    map_row(columns, partial, [&](const auto& at) HWY_ATTR { return hn::Add(at(partial), at(more)); });
  }
  for (std::int64_t n = 0; n < columns; ++n) {
    store_element(sums.data, sums.dtype, n * sums.stride, static_cast<double>(partial[n]));
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
