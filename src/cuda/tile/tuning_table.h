#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/tuning.h"
#include "cuda/runtime/device.h"

namespace tilewise::cuda {

// Tuning tables: the one place where configurations are chosen and become compile-time constants.
//
// A table is a type with a `name` and `rows`, an array of configurations. A kernel is a template over the
// table and the number of a row, and is compiled for each row. A configuration describes itself by
// `describe(description)`, so that a file can name it. Choosing a row takes two functions: whether a row can
// run the problem, and what it costs. A row that a user measured to be the fastest goes before that
// (tilewise/tuning.h), if it can run the problem.

template <typename Table>
inline constexpr int row_count = static_cast<int>(std::size(Table::rows));

/// The number of a row as a constant.
template <int row>
using Row = std::integral_constant<int, row>;

/// Calls body(Row<n>) for each row in order.
template <typename Table, typename Body>
constexpr void for_each_row(const Body& body) {
  [&]<int... row>(std::integer_sequence<int, row...>) {
    (body(Row<row>{}), ...);
  }(std::make_integer_sequence<int, row_count<Table>>{});
}

/// Calls body(Row<chosen>), so that `chosen` becomes a constant. Does nothing if there is no such row.
template <typename Table, typename Body>
void with_row(int chosen, const Body& body) {
  for_each_row<Table>([&](auto row) {
    if (row == chosen) body(row);
  });
}

/// The able row of the least cost, the first one if several are equal; -1 if none is able. `able(config)`
/// says whether a row can run the problem. `cost(row)` gets a Row and returns anything that can be compared.
template <typename Table, typename Able, typename Cost>
constexpr int least_row(const Able& able, const Cost& cost) {
  int chosen = -1;
  std::invoke_result_t<Cost, Row<0>> least{};
  for_each_row<Table>([&](auto row) {
    if (!able(Table::rows[row])) return;
    const auto own = cost(row);
    if (chosen < 0 || own < least) {
      chosen = row;
      least = own;
    }
  });
  return chosen;
}
/// The first able row; -1 if none is able.
template <typename Table, typename Able>
constexpr int first_row(const Able& able) {
  for (int row = 0; row < row_count<Table>; ++row) {
    if (able(Table::rows[row])) return row;
  }
  return -1;
}

/// The smallest value of `of(config)` among able rows, such as the smallest sufficient head dim; 0 if none
/// is.
template <typename Table, typename Able, typename Of>
constexpr int smallest(const Able& able, const Of& of) {
  int found = 0;
  for (const auto& row : Table::rows) {
    if (able(row) && (found == 0 || of(row) < found)) found = of(row);
  }
  return found;
}

/// A `cost` that chooses the first row whose tiles fill the GPU, or else the last row. A smaller tile has a
/// lower throughput, so it pays only where most SMs would be idle. Rows are in order of falling tile size.
template <typename Table>
constexpr int fill_cost(int row, bool fills) {
  return fills ? row : 2 * row_count<Table> - row;
}

// Properties of a table's rows that choosers and kernels rely on.

/// Whether rows are in order of rising dim: all of them, or those for which `counts` is true.
template <typename Table, typename Counts>
constexpr bool dims_rise(const Counts& counts) {
  int before = 0;
  for (const auto& row : Table::rows) {
    if (!counts(row)) continue;
    if (row.dim < before) return false;
    before = row.dim;
  }
  return true;
}
template <typename Table>
constexpr bool dims_rise() {
  return dims_rise<Table>([](const auto&) { return true; });
}

/// Whether all dims are powers of two, so that threads split a row's chunks evenly.
template <typename Table>
constexpr bool dims_are_powers_of_two() {
  for (const auto& row : Table::rows) {
    if (row.dim <= 0 || !std::has_single_bit(static_cast<unsigned>(row.dim))) return false;
  }
  return true;
}

/// The largest dim of any row.
template <typename Table>
constexpr int largest_dim() {
  int largest = 0;
  for (const auto& row : Table::rows) largest = row.dim > largest ? row.dim : largest;
  return largest;
}

// Rows that a user measured (tilewise/tuning.h).

/// A row's text: "dim=64 warps=4 …".
template <typename Table>
std::string row_text(int row) {
  TextString text;
  Description description(text);
  Table::rows[row].describe(description);
  return text.value();
}
/// The hashes of the rows' texts.
template <typename Table>
constexpr std::array<std::uint64_t, std::size(Table::rows)> row_hashes() {
  std::array<std::uint64_t, std::size(Table::rows)> hashes{};
  for (std::size_t row = 0; row < hashes.size(); ++row) {
    TextHash text;
    Description description(text);
    Table::rows[row].describe(description);
    hashes[row] = text.value();
  }
  return hashes;
}

template <std::size_t count>
constexpr bool all_differ(const std::array<std::uint64_t, count>& hashes) {
  for (std::size_t n = 0; n < count; ++n) {
    for (std::size_t other = 0; other < n; ++other) {
      if (hashes[n] == hashes[other]) return false;
    }
  }
  return true;
}

/// The measured row for a problem, if there is one and it is able, else `chosen`. `problem` is something that
/// describe_problem(problem, description) describes, and has a `device`.
template <typename Table, typename Problem, typename Able>
int tuned_row(const Problem& problem, const Able& able, int chosen) {
  if (!tuning_asked().load(std::memory_order_relaxed) || chosen < 0) [[likely]]
    return chosen;
  static_assert(row_count<Table> <= 64);
  static constexpr auto hashes = row_hashes<Table>();
  static_assert(all_differ(hashes), "describe() must tell the rows of a table apart");
  TextHash hash;
  Description description(hash);
  describe_problem(problem, description);
  std::uint64_t able_rows = 0;
  for (int row = 0; row < row_count<Table>; ++row) {
    if (able(Table::rows[row])) able_rows |= std::uint64_t{1} << row;
  }
  return answer_tuning({.table = Table::name,
                        .device = tuning_device(problem).index,
                        .problem = hash.value(),
                        .rows = hashes,
                        .able = able_rows,
                        .chosen = chosen,
                        .device_text = device_text,
                        .row_text = row_text<Table>,
                        .problem_text = [](const void* of) -> std::string {
                          TextString text;
                          Description words(text);
                          describe_problem(*static_cast<const Problem*>(of), words);
                          return text.value();
                        },
                        .of = &problem});
}

/// The row that runs a problem: the measured one, or else the able one of the least cost; -1 if none is able.
template <typename Table, typename Problem, typename Able, typename Cost>
int choose_row_of(const Problem& problem, const Able& able, const Cost& cost) {
  return tuned_row<Table>(problem, able, least_row<Table>(able, cost));
}

}  // namespace tilewise::cuda
