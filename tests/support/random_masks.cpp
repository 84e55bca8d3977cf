#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "support/random_parts.h"
#include "support/random_placement.h"
#include "tilewise/masks.h"

namespace tilewise::test {
namespace {

constexpr double no_score = -std::numeric_limits<double>::infinity();

// A random shape of rank 1 to 4 that broadcasts to [B, Hq, Sq, Sk].
Shape broadcast_shape(Random& rng, const RandomProblem& p) {
  Shape shape = {p.batch, p.heads_q, p.length_q, p.length_k};
  for (std::int64_t& extent : shape) {
    if (rng.chance(0.35)) extent = 1;
  }
  const std::int64_t missing = rng.pick<std::int64_t>({0, 0, 0, 1, 2, 3});
  shape.erase(shape.begin(), shape.begin() + missing);
  return shape;
}

// The fractions of elements and of whole rows that a mask hides.
struct Density {
  double elements;
  double rows;
};

Density random_density(Random& rng) {
  return {rng.pick({0.0, 0.1, 0.5, 0.9, 1.0}), rng.chance(0.3) ? 0.3 : 0.0};
}

// Calls body(index, row_hidden) for every element, in row-major order.
template <typename Body>
void for_each_element(Random& rng, const Buffer& mask, double hidden_rows, const Body& body) {
  const Shape& shape = mask.shape();
  Shape index(shape.size());
  bool row_hidden = false;
  for (std::int64_t n = mask.size(); n > 0; --n) {
    if (index.back() == 0) row_hidden = rng.noise() < hidden_rows;
    body(index, row_hidden);
    for (std::size_t dim = shape.size(); dim-- > 0;) {
      if (++index[dim] < shape[dim]) break;
      index[dim] = 0;
    }
  }
}

void make_boolean_mask(Random& rng, RandomProblem& p) {
  p.mask = random_buffer(rng, DType::boolean, broadcast_shape(rng, p), input_values);
  const Density hidden = random_density(rng);
  const bool all_ones = rng.chance(0.3);  // true is then 0xFF, the poison, instead of 1
  for_each_element(rng, p.mask, hidden.rows, [&](const Shape& index, bool row_hidden) {
    const bool hide = row_hidden || rng.noise() < hidden.elements;
    if (hide || !all_ones) p.mask.set(index, hide ? 0 : 1);
  });
}

// Sets the mask to NaN for keys past the lengths of the entries, which no call may read.
void poison_past_lengths(RandomProblem& p) {
  Buffer& mask = p.mask;
  if (!p.key_lengths.given() || mask.size() == 0 || mask.shape().back() != p.length_k || p.length_k == 1)
    return;
  if (mask.strides().back() == 0) return;
  const bool per_entry = mask.shape().size() == 4 && mask.extent(0) > 1 && mask.strides()[0] != 0;
  double longest = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) longest = std::max(longest, p.key_lengths.at(b));
  Random unused(0);
  for_each_element(unused, mask, 0, [&](const Shape& index, bool) {
    const double length = per_entry ? p.key_lengths.at(index[0]) : longest;
    if (static_cast<double>(index.back()) >= length)
      mask.set(index, std::numeric_limits<double>::quiet_NaN());
  });
}

}  // namespace

void make_additive_mask(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  const DType dtype = rng.pick({DType::f32, p.dtype});
  p.mask = random_buffer(rng, dtype, broadcast_shape(rng, p), input_values);
  const Density hidden = random_density(rng);
  const double scale = rng.pick({0.1, 1.0, magnitudes.scores});
  // Hides with -inf or, as models do, with the lowest finite number. That number is never used for whole
  // rows, since rounding errors would decide to which keys such a row attends.
  const double lowest = dtype == DType::f16 ? -65504.0 : -3.38e38;
  const double hidden_value = rng.chance(0.8) ? no_score : lowest;
  const double density = hidden_value == lowest ? std::min(hidden.elements, 0.5) : hidden.elements;
  for_each_element(rng, p.mask, hidden.rows, [&](const Shape& index, bool row_hidden) {
    const double value = row_hidden ? no_score : rng.noise() < density ? hidden_value : scale * rng.normal();
    p.mask.set(index, value);
  });
  poison_past_lengths(p);
}

namespace {

// The listed key blocks of each row of query blocks.
using BlockRows = std::vector<std::vector<std::int64_t>>;

// Makes counts and indices over [B|1, Hq|1, query blocks]. Entries past a count are invalid.
void make_lists(Random& rng, const BlockRows& rows, const Shape& shape, Buffer& counts, Buffer& indices) {
  std::size_t slots = 0;
  for (const auto& row : rows) slots = std::max(slots, row.size());
  slots += static_cast<std::size_t>(rng.between(0, 2));
  std::vector<double> sizes, entries;
  for (const auto& row : rows) {
    sizes.push_back(static_cast<double>(row.size()));
    for (std::size_t slot = 0; slot < slots; ++slot) {
      entries.push_back(slot < row.size() ? static_cast<double>(row[slot]) : rng.pick({-1.0, 1e9}));
    }
  }
  const Shape with_slots = {shape[0], shape[1], shape[2], static_cast<std::int64_t>(slots)};
  counts = random_buffer(rng, DType::i32, shape, input_indices);
  indices = random_buffer(rng, DType::i32, with_slots, input_indices);
  counts.set_values(sizes);
  indices.set_values(entries);
}

}  // namespace

void make_blocks(Random& rng, RandomProblem& p) {
  RandomBlocks& blocks = p.blocks;
  const std::int64_t blocks_q = (p.length_q + blocks.block_q - 1) / blocks.block_q;
  const std::int64_t blocks_k = (p.length_k + blocks.block_k - 1) / blocks.block_k;
  const std::int64_t entries = rng.chance(0.5) ? 1 : p.batch;
  const std::int64_t heads = rng.chance(0.5) ? 1 : p.heads_q;
  const double partial = rng.pick({0.1, 0.5, 0.9});
  const double full = rng.chance(0.6) ? rng.pick({0.1, 0.4}) : 0.0;
  BlockRows partial_rows, full_rows;
  for (std::int64_t row = 0; row < entries * heads * blocks_q; ++row) {
    partial_rows.emplace_back();
    full_rows.emplace_back();
    for (std::int64_t block = 0; block < blocks_k; ++block) {
      if (rng.chance(partial)) {
        partial_rows.back().push_back(block);
      } else if (rng.chance(full)) {
        full_rows.back().push_back(block);
      }
    }
    rng.shuffle(partial_rows.back());
    rng.shuffle(full_rows.back());
  }
  const Shape shape = {entries, heads, blocks_q};
  make_lists(rng, partial_rows, shape, blocks.counts, blocks.indices);
  if (full > 0) make_lists(rng, full_rows, shape, blocks.full_counts, blocks.full_indices);
  if (rng.chance(0.4)) return;
  const std::int64_t tiles = rng.between(1, 4);
  blocks.tiles = random_buffer(rng, DType::boolean, {tiles, blocks.block_q, blocks.block_k}, input_values);
  blocks.tiles.fill_random(rng);
  blocks.tile_ids = random_buffer(rng, DType::i32, blocks.indices.shape(), input_indices);
  std::vector<double> ids;
  for (std::int64_t n = blocks.tile_ids.size(); n > 0; --n)
    ids.push_back(static_cast<double>(rng.between(0, tiles - 1)));
  blocks.tile_ids.set_values(ids);
}

namespace {

Buffer filled(Random& rng, DType dtype, const Shape& shape, const auto& values) {
  Buffer buffer = random_buffer(rng, dtype, shape, dtype == DType::i32 ? input_indices : input_values);
  buffer.set_values(std::vector<double>(values.begin(), values.end()));
  return buffer;
}

// Makes a block mask from slices: a few for each entry, some of them bounded by diagonals.
void make_blocks_of_slices(Random& rng, RandomProblem& p) {
  RandomBlocks& blocks = p.blocks;
  const auto range = [&](std::int64_t length) {
    const std::int64_t a = rng.between(0, length), b = rng.between(0, length);
    return std::pair(std::min(a, b), std::max(a, b));
  };
  const BlockGrid grid{.masks = rng.chance(0.5) ? 1 : p.batch,
                       .length_q = p.length_q,
                       .length_k = p.length_k,
                       .block_q = blocks.block_q,
                       .block_k = blocks.block_k};
  std::vector<MaskSlice> slices(static_cast<std::size_t>(rng.between(0, 5)));
  for (MaskSlice& slice : slices) {
    std::tie(slice.q_begin, slice.q_end) = range(p.length_q);
    std::tie(slice.k_begin, slice.k_end) = range(p.length_k);
    if (rng.chance(0.5)) slice.highest = rng.between(-p.length_q, p.length_k);
    if (rng.chance(0.3)) slice.lowest = std::min(slice.highest, rng.between(-p.length_q, p.length_k));
    if (grid.masks > 0) slice.mask = rng.between(0, grid.masks - 1);
  }
  if (grid.masks == 0) slices.clear();
  const BlockLists lists = make_block_lists(slices, grid);
  const Shape counts = {lists.masks, 1, lists.rows};
  const Shape indices = {lists.masks, 1, lists.rows, lists.slots};
  blocks.block_q = lists.block_q;
  blocks.block_k = lists.block_k;
  blocks.counts = filled(rng, DType::i32, counts, lists.counts);
  blocks.indices = filled(rng, DType::i32, indices, lists.indices);
  blocks.full_counts = filled(rng, DType::i32, counts, lists.full_counts);
  blocks.full_indices =
      filled(rng, DType::i32, {lists.masks, 1, lists.rows, lists.full_slots}, lists.full_indices);
  blocks.tile_ids = filled(rng, DType::i32, indices, lists.tile_ids);
  const Shape tiles = {lists.tile_count(), lists.block_q, lists.block_k};
  std::vector<std::uint8_t> elements(static_cast<std::size_t>(tiles[0] * tiles[1] * tiles[2]));
  lists.write_tiles(elements.data());
  blocks.tiles = filled(rng, DType::boolean, tiles, elements);
}

}  // namespace

void make_masks(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  if (p.layout == Layout::packed) return;
  if (rng.chance(0.25)) {
    make_boolean_mask(rng, p);
  } else if (rng.chance(0.4)) {
    make_additive_mask(rng, p, magnitudes);
  }
  if (!rng.chance(0.2)) return;
  p.blocks.block_q = rng.pick<std::int64_t>({1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 128});
  p.blocks.block_k = rng.pick<std::int64_t>({1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 128});
  // The reference searches the lists, so long ones take too long.
  while (p.length_k / p.blocks.block_k > 64) p.blocks.block_k *= 2;
  make_blocks(rng, p);
  Random own(p.seed + 3);  // a generator of its own, so that the other choices of a seed do not change
  if (own.chance(0.4)) make_blocks_of_slices(own, p);
}

}  // namespace tilewise::test
