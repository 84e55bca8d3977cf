#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arena.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

// What splitting leaves in the workspace, beside the parts.

/// How numbers are distributed in the rows of one side, each relative to the largest of its row. Counts are
/// those of the row that has most.
struct Spread {
  /// Numbers below 2^-grade of the largest, zeros too, for each grade.
  static constexpr int grades = 4;
  static constexpr int grade(int n) { return n == 0 ? 4 : n == 1 ? 8 : n == 2 ? 11 : 13; }
  int small[grades];
  int lossy;  ///< numbers other than 0 that two parts of f16 (one, where TF32 is allowed) may not hold whole
};

/// Whether parts of f16 do. A lossy number is off by 2^-39 of the largest of its row at most. That shows
/// where large numbers of either side meet small ones alone, as in (1, 1e-8)·(1e-8, 1). But at so many
/// summands as are small in neither row, products have some size at least: so the sum of all |a b| has, of
/// which f32 itself loses 2^-24 (TF32 2^-11).
constexpr bool fits_f16(const Spread& a, const Spread& b, std::int64_t summands, bool tf32) {
  const double lost = static_cast<double>(a.lossy) + static_cast<double>(b.lossy);
  for (int i = 0; i < Spread::grades; ++i) {
    for (int j = 0; j < Spread::grades; ++j) {
      const std::int64_t both = summands - a.small[i] - b.small[j];
      const int down = Spread::grade(i) + Spread::grade(j);
      const double room = static_cast<double>(std::int64_t{1} << (tf32 ? 27 : 14));
      if (both > 0 &&
          static_cast<double>(both) * room >= lost * static_cast<double>(std::int64_t{1} << down)) {
        return true;
      }
    }
  }
  return false;
}

/// Rows of a factor, or columns of the result, whose tiles are told apart where numbers are not finite.
inline constexpr int marked_rows = 128;

/// A factor's parts [parts, rows, columns] by rows, whose stride is a multiple of 8; and its rows' exponents:
/// parts of f16 are those of x · 2^exponent.
struct Parts {
  std::uint16_t* data = nullptr;
  int* exponents = nullptr;  ///< [rows]
  std::int64_t stride = 0;
  int count = 0;  ///< of bf16; of f16 it is one less

  Parts() = default;
  Parts(Arena& arena, const Matrix& of, int bf16_parts)
      : stride((of.columns + 7) / 8 * 8), count(bf16_parts) {
    data = arena.take<std::uint16_t>(of.rows * stride * count);
    exponents = arena.take<int>(of.rows);
  }
  /// As one matrix. Maps for copies serve both types.
  Matrix matrix(const Matrix& of) const {
    return {.data = reinterpret_cast<std::byte*>(data),
            .dtype = DType::bf16,
            .rows = of.rows * count,
            .columns = of.columns,
            .stride_row = stride};
  }
};

/// What is found out while splitting, all of it 0 before.
struct Findings {
  Spread a, b;  ///< b's and its gate's
};

/// The workspace.
struct SplitSpace {
  Parts a, b, gate;
  Findings* findings = nullptr;
  int* row_marks = nullptr;     ///< [m / 128]: nonzero where a number in these rows of a is not finite
  int* column_marks = nullptr;  ///< [n / 128]: the same of b and its gate
  std::size_t zeroed = 0;       ///< bytes of the last three, which lie together
  std::size_t bytes = 0;

  static constexpr std::int64_t marks(std::int64_t rows) { return (rows + marked_rows - 1) / marked_rows; }

  SplitSpace(const GemmCall& call, void* base) {
    Arena arena(base);
    const GemmProblem& problem = call.problem;
    const int parts = problem.allow_tf32 ? 2 : 3;
    a = Parts(arena, call.a, parts);
    b = Parts(arena, call.b, parts);
    if (problem.gated) gate = Parts(arena, call.gate, parts);
    const std::int64_t of_rows = marks(problem.m);
    const std::int64_t of_columns = marks(problem.n);
    zeroed = sizeof(Findings) + static_cast<std::size_t>(of_rows + of_columns) * sizeof(int);
    findings = reinterpret_cast<Findings*>(arena.take<std::byte>(static_cast<std::int64_t>(zeroed)));
    bytes = arena.used();
    if (findings == nullptr) return;
    row_marks = reinterpret_cast<int*>(findings + 1);
    column_marks = row_marks + of_rows;
  }
};

}  // namespace tilewise::cuda::gemm
