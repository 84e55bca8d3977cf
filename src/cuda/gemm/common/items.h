#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::gemm {

/// Numbers from `first` up to, not including, `last`.
struct Span {
  int first = 0, last = 0;

  constexpr int count() const { return std::max(last - first, 0); }
  /// The same in units of `unit`, those in part included.
  constexpr Span in_units(int unit) const {
    return {first / unit, last > first ? (last + unit - 1) / unit : first / unit};
  }
  /// Grown to whole units, up to `end`.
  constexpr Span whole_units(int unit, int end) const {
    const Span units = in_units(unit);
    return {units.first * unit, std::min(units.last * unit, end)};
  }
};

/// Which elements of a matrix are visible: row m has those of columns m + low up to, not including, m + high.
struct VisibleBand {
  static constexpr int unbounded = 1 << 30;
  int rows = 0, columns = 0;
  int low = -unbounded, high = unbounded;

  /// The number, at least `least` and at most `columns`. Without references, as std::clamp has them, which
  /// would take up local memory.
  constexpr int within(int x, int least) const { return x < least ? least : x > columns ? columns : x; }
  constexpr VisibleBand transposed() const { return {columns, rows, 1 - high, 1 - low}; }
  /// The columns that any of some neighbouring rows has.
  constexpr Span of_rows(int first, int count) const {
    const int last_row = (first + count < rows ? first + count : rows) - 1;
    const int begin = within(first + low, 0);
    return {begin, within(last_row + high, begin)};
  }
};

/// The tiles of 128 x 128 that a block mask leaves of the matrices of several GEMMs: those whose byte is not
/// 0.
struct ShownTiles {
  const std::uint8_t* data = nullptr;  ///< null if there is no block mask
  int item = 0, row = 0, column = 0;   ///< bytes from one to the next

  constexpr bool any_hidden() const { return data != nullptr; }
  constexpr bool at(int i, int r, int c) const {
    return data == nullptr ||
           data[std::int64_t{i} * item + std::int64_t{r} * row + std::int64_t{c} * column] != 0;
  }
  constexpr ShownTiles transposed() const { return {data, item, column, row}; }
};

/// Several GEMMs of one shape: where the matrices of the next one are, and what of each is left out.
struct Items {
  std::int64_t count = 1;
  std::int64_t a = 0, b = 0;  ///< elements from one matrix to the next
  std::int64_t out_rows = 0;  ///< rows from one result to the next

  /// The visible elements of A, if `over_k`: others are neither read nor multiplied. Else those of the
  /// result: tiles without any are not computed.
  VisibleBand visible;
  ShownTiles shown;
  bool over_k = false;
  /// Where over_k, K of a tile may be cut into slices of at most so many stages, or into exactly `slices` if
  /// there is a block mask. Each slice has a result of its own, and all of them must be added.
  int longest_slice = VisibleBand::unbounded;
  int slices = 1;
  std::int64_t slice_rows = 0;  ///< rows from the results of one slice to those of the next
};

inline constexpr int item_tile = 128;  ///< rows and columns of a tile
inline constexpr int item_stage = 64;  ///< of K

/// The stages of K of the rows' tile that begins at row `first` of A.
constexpr Span visible_stages(const VisibleBand& visible, int first) {
  return visible.of_rows(first, item_tile).in_units(item_stage);
}
/// Into how many slices these are cut. Without any there is one, of zeros.
constexpr int slices_of(const Span& stages, int longest) {
  return std::max((stages.count() + longest - 1) / longest, 1);
}
/// Slice `n` of `slices` of about the same length.
constexpr Span slice_of(const Span& stages, int n, int slices) {
  const int count = stages.count();
  return {stages.first + count * n / slices, stages.first + count * (n + 1) / slices};
}

}  // namespace tilewise::cuda::gemm
