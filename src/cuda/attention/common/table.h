#pragma once

#include <bit>

namespace tilewise::cuda::mma {

// What those who choose among the rows of a tuning table, and the kernels of its rows, take for granted.

/// Whether rows of a table come by rising dim: all of them, or those of which `counts` says so.
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

/// Whether all dims are powers of two: threads share a row's chunks out evenly there.
template <typename Table>
constexpr bool dims_are_powers_of_two() {
  for (const auto& row : Table::rows) {
    if (row.dim <= 0 || !std::has_single_bit(static_cast<unsigned>(row.dim))) return false;
  }
  return true;
}

/// The largest dim there is a row for.
template <typename Table>
constexpr int largest_dim() {
  int largest = 0;
  for (const auto& row : Table::rows) largest = row.dim > largest ? row.dim : largest;
  return largest;
}

}  // namespace tilewise::cuda::mma
