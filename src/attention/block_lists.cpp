#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "tilewise/masks.h"

namespace tilewise {
namespace {

constexpr std::int64_t most_positions = (std::int64_t{1} << 31) - 1;  // the limit of attention
constexpr std::int64_t word_bits = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool empty() const { return begin >= end; }
  std::int64_t size() const { return end - begin; }
};

Range intersection(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

Range queries_of(const MaskSlice& slice) { return {slice.q_begin, slice.q_end}; }

// The keys that a slice shows to query i.
Range keys_of(const MaskSlice& slice, std::int64_t i) {
  return {std::max(slice.k_begin, i + slice.lowest), std::min(slice.k_end, i + slice.highest + 1)};
}

// The keys that a slice shows to at least one of the queries, and the keys that it shows to all of them.
Range keys_of_some(const MaskSlice& slice, Range queries) {
  return {keys_of(slice, queries.begin).begin, keys_of(slice, queries.end - 1).end};
}
Range keys_of_all(const MaskSlice& slice, Range queries) {
  return {keys_of(slice, queries.end - 1).begin, keys_of(slice, queries.begin).end};
}

// The elements of a block, one bit each. Each row begins at a word.
class Tile {
 public:
  Tile(std::int64_t rows, std::int64_t columns)
      : row_words_(ceil_div(columns, word_bits)), words_(static_cast<std::size_t>(rows * row_words_)) {}

  void clear() { std::fill(words_.begin(), words_.end(), std::uint64_t{0}); }

  /// Makes these columns of a row visible.
  void show(std::int64_t row, Range columns) {
    std::uint64_t* const words = words_.data() + row * row_words_;
    while (!columns.empty()) {
      const std::int64_t first = columns.begin % word_bits;
      const std::int64_t count = std::min(columns.size(), word_bits - first);
      const std::uint64_t ones = ~std::uint64_t{0} >> (word_bits - count);
      words[columns.begin / word_bits] |= ones << first;
      columns.begin += count;
    }
  }

  std::int64_t shown() const {
    std::int64_t count = 0;
    for (const std::uint64_t word : words_) count += std::popcount(word);
    return count;
  }

  std::span<const std::uint64_t> words() const { return words_; }

 private:
  std::int64_t row_words_;
  std::vector<std::uint64_t> words_;
};

// For each value of a byte, its eight bits as bytes 0 or 1, lowest bit first.
constexpr std::array<std::array<std::uint8_t, 8>, 256> eight_elements = [] {
  std::array<std::array<std::uint8_t, 8>, 256> table{};
  for (std::size_t bits = 0; bits < 256; ++bits) {
    for (std::size_t n = 0; n < 8; ++n) table[bits][n] = static_cast<std::uint8_t>(bits >> n & 1);
  }
  return table;
}();

// The different tiles of all masks. Equal tiles get the same id.
class UniqueTiles {
 public:
  std::int32_t add(const Tile& tile) {
    const std::span<const std::uint64_t> words = tile.words();
    std::uint64_t hash = 0;
    for (const std::uint64_t word : words) hash = (std::rotl(hash, 5) ^ word) * 0x9e3779b97f4a7c15u;
    const auto [from, to] = by_hash_.equal_range(hash);
    for (auto known = from; known != to; ++known) {
      const auto begin = words_.begin() + known->second * static_cast<std::ptrdiff_t>(words.size());
      if (std::equal(words.begin(), words.end(), begin)) return known->second;
    }
    const auto id = static_cast<std::int32_t>(by_hash_.size());
    by_hash_.emplace(hash, id);
    words_.insert(words_.end(), words.begin(), words.end());
    return id;
  }

  std::vector<std::uint64_t>& words() { return words_; }

 private:
  std::unordered_multimap<std::uint64_t, std::int32_t> by_hash_;
  std::vector<std::uint64_t> words_;
};

// Lists of different lengths, one per row, stored one after another.
struct Lists {
  std::vector<std::int32_t> counts;
  std::vector<std::int32_t> entries;

  std::int64_t slots() const {
    return counts.empty() ? 1 : std::max<std::int64_t>(1, *std::max_element(counts.begin(), counts.end()));
  }

  /// [rows, slots]: each row's entries, padded with zeros.
  std::vector<std::int32_t> padded() const {
    const auto width = static_cast<std::size_t>(slots());
    std::vector<std::int32_t> result(counts.size() * width);
    auto next = entries.begin();
    for (std::size_t row = 0; row < counts.size(); ++row) {
      const auto end = next + counts[row];
      std::copy(next, end, result.begin() + static_cast<std::ptrdiff_t>(row * width));
      next = end;
    }
    return result;
  }
};

// For each row of query blocks of each mask, the slices that intersect it.
class SlicesByRow {
 public:
  SlicesByRow(std::span<const MaskSlice> slices, std::int64_t block_q, std::int64_t rows, std::int64_t masks)
      : slices_(slices), begins_(static_cast<std::size_t>(masks * rows + 1)) {
    const auto for_each_row = [&](const MaskSlice& slice, const auto& body) {
      if (slice.q_begin >= slice.q_end || slice.k_begin >= slice.k_end) return;
      for (std::int64_t row = slice.q_begin / block_q; row * block_q < slice.q_end; ++row) {
        body(static_cast<std::size_t>(slice.mask * rows + row));
      }
    };
    for (const MaskSlice& slice : slices) {
      for_each_row(slice, [&](std::size_t row) { ++begins_[row + 1]; });
    }
    for (std::size_t row = 1; row < begins_.size(); ++row) begins_[row] += begins_[row - 1];
    ids_.resize(static_cast<std::size_t>(begins_.back()));
    std::vector<std::int64_t> next(begins_.begin(), begins_.end() - 1);
    for (std::size_t id = 0; id < slices.size(); ++id) {
      for_each_row(slices[id], [&](std::size_t row) {
        ids_[static_cast<std::size_t>(next[row]++)] = static_cast<std::uint32_t>(id);
      });
    }
  }

  template <typename Body>
  void for_each(std::int64_t row, const Body& body) const {
    const auto at = static_cast<std::size_t>(row);
    for (std::int64_t n = begins_[at]; n < begins_[at + 1]; ++n) {
      body(slices_[ids_[static_cast<std::size_t>(n)]]);
    }
  }

 private:
  std::span<const MaskSlice> slices_;
  std::vector<std::int64_t> begins_;
  std::vector<std::uint32_t> ids_;
};

enum class Kind : std::uint8_t { hidden, partial, full };

// The state of a key block while a row of query blocks is computed.
struct BlockState {
  Kind kind = Kind::hidden;
  std::int64_t covered = 0;  // this many of the first queries see all its keys
};

// Builds the lists, one row of query blocks after another.
class BlockListBuilder {
 public:
  BlockListBuilder(std::span<const MaskSlice> slices, const BlockGrid& grid)
      : grid_(grid),
        rows_(ceil_div(grid.length_q, grid.block_q)),
        slices_(slices, grid.block_q, rows_, grid.masks),
        states_(static_cast<std::size_t>(ceil_div(grid.length_k, grid.block_k))),
        tile_(grid.block_q, grid.block_k) {}

  BlockLists lists() {
    for (std::int64_t row = 0; row < grid_.masks * rows_; ++row) add_row(row);
    if (ids_.empty()) {  // attention requires at least one tile, even if no id names it
      tile_.clear();
      tiles_.add(tile_);
    }
    const Lists ids{partial_.counts, ids_};
    return {.masks = grid_.masks,
            .rows = rows_,
            .slots = partial_.slots(),
            .full_slots = full_.slots(),
            .block_q = grid_.block_q,
            .block_k = grid_.block_k,
            .counts = partial_.counts,
            .indices = partial_.padded(),
            .full_counts = full_.counts,
            .full_indices = full_.padded(),
            .tile_ids = ids.padded(),
            .tile_bits = std::move(tiles_.words())};
  }

 private:
  Range keys_in(std::int64_t block) const {
    return intersection({block * grid_.block_k, (block + 1) * grid_.block_k}, {0, grid_.length_k});
  }

  void add_row(std::int64_t row) {
    const std::int64_t first = row % rows_ * grid_.block_q;
    const Range queries = {first, std::min(first + grid_.block_q, grid_.length_q)};
    const Range touched = mark(row, queries);
    std::int32_t partial = 0, full = 0;
    for (std::int64_t block = touched.begin; block < touched.end; ++block) {
      BlockState& state = states_[static_cast<std::size_t>(block)];
      std::int32_t id = 0;
      if (state.kind == Kind::partial) state.kind = render(row, queries, block, id);
      if (state.kind == Kind::full) {
        full_.entries.push_back(static_cast<std::int32_t>(block));
        ++full;
      } else if (state.kind == Kind::partial) {
        partial_.entries.push_back(static_cast<std::int32_t>(block));
        ids_.push_back(id);
        ++partial;
      }
      state = {};
    }
    partial_.counts.push_back(partial);
    full_.counts.push_back(full);
  }

  // Marks the blocks of a row as full or partial, and returns the range of marked blocks. Slices are sorted
  // by their first query, so several slices that fill a block from top to bottom are recognised without
  // rendering it.
  Range mark(std::int64_t row, Range queries) {
    Range touched = {static_cast<std::int64_t>(states_.size()), 0};
    slices_.for_each(row, [&](const MaskSlice& slice) {
      const Range own = intersection(queries, queries_of(slice));
      const Range seen_by_some = keys_of_some(slice, own);
      if (seen_by_some.empty()) return;
      const Range cut = {seen_by_some.begin / grid_.block_k, ceil_div(seen_by_some.end, grid_.block_k)};
      const Range seen_by_all = keys_of_all(slice, own);
      // The last block ends with the keys.
      const Range filled = {ceil_div(seen_by_all.begin, grid_.block_k),
                            seen_by_all.end == grid_.length_k ? cut.end : seen_by_all.end / grid_.block_k};
      for (std::int64_t block = cut.begin; block < cut.end; ++block) {
        BlockState& state = states_[static_cast<std::size_t>(block)];
        const bool fills = block >= filled.begin && block < filled.end;
        if (fills && own.begin - queries.begin <= state.covered) {
          state.covered = std::max(state.covered, own.end - queries.begin);
        }
        state.kind = state.covered == queries.size() ? Kind::full : Kind::partial;
      }
      touched = {std::min(touched.begin, cut.begin), std::max(touched.end, cut.end)};
    });
    return touched;
  }

  // Renders a partial block into a tile and returns its kind: several slices together may fill it or hide all
  // of it.
  Kind render(std::int64_t row, Range queries, std::int64_t block, std::int32_t& id) {
    const Range keys = keys_in(block);
    tile_.clear();
    slices_.for_each(row, [&](const MaskSlice& slice) {
      const Range own = intersection(queries, queries_of(slice));
      if (intersection(keys, keys_of_some(slice, own)).empty()) return;
      for (std::int64_t i = own.begin; i < own.end; ++i) {
        const Range seen = intersection(keys, keys_of(slice, i));
        tile_.show(i - queries.begin, {seen.begin - keys.begin, seen.end - keys.begin});
      }
    });
    const std::int64_t shown = tile_.shown();
    if (shown == 0) return Kind::hidden;
    if (shown == queries.size() * keys.size()) return Kind::full;
    id = tiles_.add(tile_);
    return Kind::partial;
  }

  BlockGrid grid_;
  std::int64_t rows_;
  SlicesByRow slices_;
  std::vector<BlockState> states_;  // one per key block; reset to hidden after each row
  Tile tile_;
  UniqueTiles tiles_;
  Lists partial_, full_;
  std::vector<std::int32_t> ids_;  // the tiles of partial blocks
};

BlockGrid checked(const BlockGrid& given) {
  BlockGrid grid = given;
  check(grid.masks >= 0 && grid.masks <= most_positions, "masks", "0 or above and below 2^31", grid.masks);
  check(grid.length_q >= 0 && grid.length_q <= most_positions, "length_q", "0 or above and below 2^31",
        grid.length_q);
  check(grid.length_k >= 0 && grid.length_k <= most_positions, "length_k", "0 or above and below 2^31",
        grid.length_k);
  check(grid.block_q >= 1, "block_q", "1 or above", grid.block_q);
  check(grid.block_k >= 1, "block_k", "1 or above", grid.block_k);
  grid.block_q = std::min(grid.block_q, std::max<std::int64_t>(grid.length_q, 1));
  grid.block_k = std::min(grid.block_k, std::max<std::int64_t>(grid.length_k, 1));
  return grid;
}

// Checks a slice, and limits its diagonals so that sums with positions do not overflow.
MaskSlice checked(const MaskSlice& given, const BlockGrid& grid) {
  MaskSlice slice = given;
  const auto check_range = [](Range range, std::int64_t length, std::string_view name) {
    check(
        range.begin >= 0 && range.begin <= range.end && range.end <= length, name,
        [&] { return "a range within 0 to " + std::to_string(length); },
        [&] { return std::to_string(range.begin) + " to " + std::to_string(range.end); });
  };
  check_range({slice.q_begin, slice.q_end}, grid.length_q, "slices.q_begin");
  check_range({slice.k_begin, slice.k_end}, grid.length_k, "slices.k_begin");
  check(
      slice.mask >= 0 && slice.mask < grid.masks, "slices.mask",
      [&] { return "one of the " + std::to_string(grid.masks) + " masks"; }, slice.mask);
  check(
      slice.lowest <= slice.highest, "slices.lowest",
      [&] { return "at most highest, " + std::to_string(slice.highest); }, slice.lowest);
  slice.lowest = std::clamp(slice.lowest, -MaskSlice::unbounded, MaskSlice::unbounded);
  slice.highest = std::clamp(slice.highest, -MaskSlice::unbounded, MaskSlice::unbounded);
  return slice;
}

}  // namespace

std::int64_t BlockLists::tile_count() const {
  return static_cast<std::int64_t>(tile_bits.size()) / std::max<std::int64_t>(1, block_q * row_words());
}

void BlockLists::write_tiles(std::uint8_t* elements) const {
  const std::uint64_t* words = tile_bits.data();
  for (std::int64_t row = tile_count() * block_q; row > 0; --row) {
    for (std::int64_t j = 0; j < block_k; j += 8) {
      const std::uint64_t bits = words[j / word_bits] >> (j % word_bits) & 0xff;
      const auto count = static_cast<std::size_t>(std::min<std::int64_t>(8, block_k - j));
      std::memcpy(elements, &eight_elements[static_cast<std::size_t>(bits)], count);
      elements += count;
    }
    words += row_words();
  }
}

BlockMask BlockLists::view(std::uint8_t* tiles) {
  const auto lists = [&](std::vector<std::int32_t>& entries, std::int64_t width) {
    return Tensor::of(entries.data(), {masks, 1, rows, width});
  };
  return {.block_q = block_q,
          .block_k = block_k,
          .counts = Tensor::of(counts.data(), {masks, 1, rows}),
          .indices = lists(indices, slots),
          .full_counts = Tensor::of(full_counts.data(), {masks, 1, rows}),
          .full_indices = lists(full_indices, full_slots),
          .tile_ids = lists(tile_ids, slots),
          .tiles = Tensor(tiles, DType::boolean, std::array{tile_count(), block_q, block_k})};
}

BlockLists make_block_lists(std::span<const MaskSlice> slices, const BlockGrid& grid) {
  const BlockGrid within = checked(grid);
  std::vector<MaskSlice> checked_slices;
  checked_slices.reserve(slices.size());
  for (const MaskSlice& slice : slices) checked_slices.push_back(checked(slice, within));
  std::stable_sort(checked_slices.begin(), checked_slices.end(),
                   [](const MaskSlice& a, const MaskSlice& b) { return a.q_begin < b.q_begin; });
  return BlockListBuilder(checked_slices, within).lists();
}

}  // namespace tilewise
