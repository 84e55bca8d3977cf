#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arena.h"
#include "cuda/gemm/common/items.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

// The workspace of `split`: the operands' 16-bit parts, and what was found out while splitting.

/// How sizes are distributed in the rows of A, or of B and its gate, relative to the largest number of each
/// row. Each count is the maximum over rows.
struct Spread {
  static constexpr int grades = 4;
  static constexpr int grade(int n) { return n == 0 ? 4 : n == 1 ? 8 : n == 2 ? 11 : 13; }
  int small[grades];  ///< for each grade: numbers below 2^-grade of the row's largest, zeros included
  int lossy;          ///< numbers other than 0 of which f16 parts may hold less than f32 (or TF32) does
};

/// Whether f16 is exact enough for a dot product of `k` numbers. A lossy number is off by at most 2^-39 of
/// the largest of its row. That shows only where large numbers of each operand meet small ones of the other,
/// as in (1, 1e-8)·(1e-8, 1). At all indices where neither row has a number below its grade, |a·b| has at
/// least a certain size. This bounds Σ|a·b| from below, and f32 itself loses 2^-24 of that sum (TF32 2^-11).
constexpr bool fits_f16(const Spread& a, const Spread& b, std::int64_t k, bool tf32) {
  const double lost = static_cast<double>(a.lossy) + static_cast<double>(b.lossy);
  for (int i = 0; i < Spread::grades; ++i) {
    for (int j = 0; j < Spread::grades; ++j) {
      const std::int64_t both = k - a.small[i] - b.small[j];
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

/// Rows of A or B, those of a tile of the result, that share a mark. It says that they contain infinities or
/// NaN.
inline constexpr int marked_rows = 128;

/// The parts of an operand, [parts, rows, columns] and row-major, and the exponents of its rows: the f16
/// parts are those of x · 2^exponent.
///
/// Several GEMMs of the same shape have the rows of all their matrices below each other. Those of each matrix
/// are padded with zeros to whole tiles. A tile of rows of A has either f16 or bf16 parts. B has both, the
/// bf16 parts after the f16 ones, because it meets tiles of either kind.
struct Parts {
  std::uint16_t* data = nullptr;
  int* exponents = nullptr;    ///< [rows]
  std::int64_t stride = 0;     ///< of a row; a multiple of 8
  std::int64_t rows = 0;       ///< of all matrices
  std::int64_t item_rows = 0;  ///< from one matrix to the next
  int count = 0;               ///< of all parts; without `first_bf16` there is one f16 part less
  int first_bf16 = 0;

  Parts() = default;
  Parts(Arena& arena, const Matrix& of, int bf16_parts)
      : stride((of.columns + 7) / 8 * 8), rows(of.rows), item_rows(of.rows), count(bf16_parts) {
    take(arena);
  }
  /// The parts of several matrices.
  Parts(Arena& arena, const Matrix& of, int bf16_parts, std::int64_t items, int before_bf16)
      : stride((of.columns + 7) / 8 * 8),
        item_rows((of.rows + marked_rows - 1) / marked_rows * marked_rows),
        count(before_bf16 + bf16_parts),
        first_bf16(before_bf16) {
    rows = items * item_rows;
    take(arena);
  }
  void take(Arena& arena) {
    data = arena.take<std::uint16_t>(rows * stride * count);
    exponents = arena.take<int>(rows);
  }
  /// All parts as one matrix. TMA copies bits, so a map for bf16 serves f16, too.
  Matrix matrix(const Matrix& of) const {
    return {.data = reinterpret_cast<std::byte*>(data),
            .dtype = DType::bf16,
            .rows = rows * count,
            .columns = of.columns,
            .stride_row = stride};
  }
};

/// What is counted while splitting. It is 0 before.
struct Findings {
  Spread a, b;  ///< b is that of B and its gate
};

/// A tile of the result of one of several GEMMs, and the stages of K that are summed. Without a stage, the
/// result is 0. With a block mask, the stages are places in a list.
struct Unit {
  int m, n;  ///< counted in tiles; m: among the rows of all matrices of A
  int slice;
  Span stages;
};

/// What is decided on the device, in order: which tiles are computed; and while splitting, from which parts.
struct UnitPlan {
  int* count = nullptr;         ///< units
  Unit* units = nullptr;        ///< of tiles that are `across` wide
  int* stage_lists = nullptr;   ///< with a block mask over K, for each tile of rows: [stages]
  int* columns = nullptr;       ///< of K that these stages have
  int across = 1;               ///< tiles next to each other that have the same stages
  Spread* spreads = nullptr;    ///< of A, for each tile of rows
  int* fit_f16 = nullptr;       ///< for each tile of rows: whether f16 parts are exact enough
  int row_tiles = 0;            ///< of all matrices of A
  int item_row_tiles = 0;       ///< of one matrix
  int k = 0, stages = 0;        ///< of all of K
  std::int64_t most_units = 0;  ///< with each of those across
};

struct SplitWorkspace {
  Parts a, b, gate;
  Findings* findings = nullptr;
  int* row_marks = nullptr;     ///< [a.rows / 128]: not 0 where these rows of A contain infinities or NaN
  int* column_marks = nullptr;  ///< [b.rows / 128]: the same for B and its gate
  std::size_t zeroed = 0;       ///< bytes of findings and marks, which are contiguous
  std::size_t bytes = 0;

  static constexpr std::int64_t marks(std::int64_t rows) { return (rows + marked_rows - 1) / marked_rows; }

  SplitWorkspace(const GemmCall& call, void* base) {
    Arena arena(base);
    const GemmProblem& problem = call.problem;
    const int parts = problem.allow_tf32 ? 2 : 3;
    a = Parts(arena, call.a, parts);
    b = Parts(arena, call.b, parts);
    if (problem.gated) gate = Parts(arena, call.gate, parts);
    take_findings(arena, 0);
    bytes = arena.used();
  }

 protected:
  SplitWorkspace() = default;
  /// Also takes room for the spreads of tiles, behind the marks.
  void take_findings(Arena& arena, std::int64_t spreads) {
    const std::int64_t row_mark_count = marks(a.rows);
    const std::int64_t column_mark_count = marks(b.rows);
    zeroed = sizeof(Findings) + static_cast<std::size_t>(row_mark_count + column_mark_count) * sizeof(int) +
             static_cast<std::size_t>(spreads) * sizeof(Spread);
    findings = reinterpret_cast<Findings*>(arena.take<std::byte>(static_cast<std::int64_t>(zeroed)));
    if (findings == nullptr) return;
    row_marks = reinterpret_cast<int*>(findings + 1);
    column_marks = row_marks + row_mark_count;
  }
};

/// The workspace of several GEMMs.
struct ItemsWorkspace : SplitWorkspace {
  UnitPlan plan;

  ItemsWorkspace(const GemmCall& call, void* base, const Items& items) {
    Arena arena(base);
    a = Parts(arena, call.a, 3, items.count, 0);
    b = Parts(arena, call.b, 3, items.count, 2);
    const std::int64_t row_tiles = marks(a.rows), column_tiles = marks(call.problem.n);
    take_findings(arena, row_tiles);
    plan.row_tiles = static_cast<int>(row_tiles);
    plan.item_row_tiles = static_cast<int>(marks(call.a.rows));
    plan.across = items.over_k ? static_cast<int>(column_tiles) : 1;
    plan.fit_f16 = arena.take<int>(row_tiles);
    plan.count = arena.take<int>(1);
    plan.k = static_cast<int>(call.problem.k);
    plan.stages = static_cast<int>((call.problem.k + item_stage - 1) / item_stage);
    const bool lists = items.over_k && items.shown.any_hidden();
    const std::int64_t slices = lists ? items.slices : slices_of({0, plan.stages}, items.longest_slice);
    if (lists) {
      plan.stage_lists = arena.take<int>(row_tiles, plan.stages);
      plan.columns = arena.take<int>(row_tiles);
    }
    plan.units = arena.take<Unit>(row_tiles, items.over_k ? slices : column_tiles);
    plan.most_units = row_tiles * column_tiles * (items.over_k ? slices : 1);
    bytes = arena.used();
    if (findings != nullptr) plan.spreads = reinterpret_cast<Spread*>(column_marks + marks(b.rows));
  }
};

}  // namespace tilewise::cuda::gemm
