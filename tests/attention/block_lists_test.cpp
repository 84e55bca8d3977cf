#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "support/random.h"
#include "tilewise/masks.h"

// Masks by ranges against the rule that each of them says, element by element.
namespace tilewise::test::block_lists_test {
namespace {

using Sees = std::function<bool(std::int64_t i, std::int64_t j)>;

bool slice_shows(const MaskSlice& slice, std::int64_t i, std::int64_t j) {
  return i >= slice.q_begin && i < slice.q_end && j >= slice.k_begin && j < slice.k_end &&
         j - i >= slice.lowest && j - i <= slice.highest;
}

std::vector<std::uint8_t> tiles_of(const BlockLists& lists) {
  std::vector<std::uint8_t> tiles(
      static_cast<std::size_t>(lists.tile_count() * lists.block_q * lists.block_k));
  lists.write_tiles(tiles.data());
  return tiles;
}

// The elements of mask n: one of `shape.length_q` · `shape.length_k`.
std::vector<bool> elements_of(const BlockLists& lists, const BlockGrid& grid, std::int64_t n) {
  const std::vector<std::uint8_t> tiles = tiles_of(lists);
  std::vector<bool> seen(static_cast<std::size_t>(grid.length_q * grid.length_k));
  const auto show = [&](std::int64_t row, std::int32_t block, const std::uint8_t* tile) {
    for (std::int64_t i = 0; i < lists.block_q; ++i) {
      for (std::int64_t j = 0; j < lists.block_k; ++j) {
        const std::int64_t query = row * lists.block_q + i, key = block * lists.block_k + j;
        const bool shown = tile == nullptr || tile[i * lists.block_k + j] != 0;
        const bool inside = query < grid.length_q && key < grid.length_k;
        EXPECT_TRUE(inside || tile == nullptr || !shown) << "a tile shows what does not exist";
        if (shown && inside) seen[static_cast<std::size_t>(query * grid.length_k + key)] = true;
      }
    }
  };
  for (std::int64_t row = 0; row < lists.rows; ++row) {
    const std::int64_t at = n * lists.rows + row;
    for (std::int64_t slot = 0; slot < lists.counts[static_cast<std::size_t>(at)]; ++slot) {
      const auto entry = static_cast<std::size_t>(at * lists.slots + slot);
      show(row, lists.indices[entry], tiles.data() + lists.tile_ids[entry] * lists.block_q * lists.block_k);
    }
    for (std::int64_t slot = 0; slot < lists.full_counts[static_cast<std::size_t>(at)]; ++slot) {
      show(row, lists.full_indices[static_cast<std::size_t>(at * lists.full_slots + slot)], nullptr);
    }
  }
  return seen;
}

void expect_mask(const std::vector<MaskSlice>& slices, const BlockGrid& grid, const Sees& sees) {
  const std::vector<bool> seen = elements_of(make_block_lists(slices, grid), grid, 0);
  for (std::int64_t i = 0; i < grid.length_q; ++i) {
    for (std::int64_t j = 0; j < grid.length_k; ++j) {
      ASSERT_EQ(seen[static_cast<std::size_t>(i * grid.length_k + j)], sees(i, j))
          << "query " << i << ", key " << j;
    }
  }
}

BlockGrid square(std::int64_t length, std::int64_t block = 16) {
  return {.length_q = length, .length_k = length, .block_q = block, .block_k = block};
}

MaskSlice random_slice(Random& rng, const BlockGrid& grid) {
  const auto range = [&](std::int64_t length) {
    const std::int64_t a = rng.between(0, length), b = rng.between(0, length);
    return std::array{std::min(a, b), std::max(a, b)};
  };
  const auto q = range(grid.length_q), k = range(grid.length_k);
  MaskSlice slice{.q_begin = q[0], .q_end = q[1], .k_begin = k[0], .k_end = k[1]};
  if (rng.chance(0.6)) slice.highest = rng.between(-grid.length_q, grid.length_k);
  if (rng.chance(0.6)) slice.lowest = std::min(slice.highest, rng.between(-grid.length_q, grid.length_k));
  slice.mask = rng.between(0, grid.masks - 1);
  return slice;
}

TEST(BlockLists, RandomSlicesShowWhatTheyShowElementByElement) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random rng(seed);
    const BlockGrid grid{.masks = rng.between(1, 3),
                         .length_q = rng.between(1, 90),
                         .length_k = rng.between(1, 90),
                         .block_q = rng.pick<std::int64_t>({1, 3, 8, 16, 100}),
                         .block_k = rng.pick<std::int64_t>({1, 5, 8, 64, 100})};
    std::vector<MaskSlice> slices(static_cast<std::size_t>(rng.between(0, 6)));
    for (MaskSlice& slice : slices) slice = random_slice(rng, grid);
    const BlockLists lists = make_block_lists(slices, grid);
    for (std::int64_t n = 0; n < grid.masks; ++n) {
      const std::vector<bool> seen = elements_of(lists, grid, n);
      for (std::int64_t i = 0; i < grid.length_q; ++i) {
        for (std::int64_t j = 0; j < grid.length_k; ++j) {
          const bool shown = std::any_of(slices.begin(), slices.end(), [&](const MaskSlice& slice) {
            return slice.mask == n && slice_shows(slice, i, j);
          });
          ASSERT_EQ(seen[static_cast<std::size_t>(i * grid.length_k + j)], shown)
              << "mask " << n << ", query " << i << ", key " << j;
        }
      }
    }
  }
}

// What a kernel gains from lists: no block is listed that shows nothing, no full one among the partial ones,
// and no two tiles are equal.
TEST(BlockLists, PartialBlocksAreNeitherEmptyNorFullAndTilesDiffer) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random rng(seed);
    const BlockGrid grid{.length_q = 70, .length_k = 50, .block_q = 16, .block_k = 16};
    std::vector<MaskSlice> slices(4);
    for (MaskSlice& slice : slices) slice = random_slice(rng, grid);
    const BlockLists lists = make_block_lists(slices, grid);
    const std::vector<std::uint8_t> elements = tiles_of(lists);
    std::set<std::vector<std::uint8_t>> tiles;
    for (std::int64_t tile = 0; tile < lists.tile_count(); ++tile) {
      const auto begin = elements.begin() + tile * 256;
      tiles.emplace(begin, begin + 256);
    }
    EXPECT_EQ(static_cast<std::int64_t>(tiles.size()), lists.tile_count());
    for (std::int64_t row = 0; row < lists.rows; ++row) {
      for (std::int64_t slot = 0; slot < lists.counts[static_cast<std::size_t>(row)]; ++slot) {
        const auto entry = static_cast<std::size_t>(row * lists.slots + slot);
        const auto begin = elements.begin() + lists.tile_ids[entry] * 256;
        const auto shown = std::count(begin, begin + 256, 1);
        const std::int64_t queries = std::min<std::int64_t>(16, 70 - 16 * row);
        const std::int64_t keys = std::min<std::int64_t>(16, 50 - 16 * lists.indices[entry]);
        EXPECT_GT(shown, 0);
        EXPECT_LT(shown, queries * keys);
      }
    }
  }
}

TEST(BlockLists, SlicesThatFillABlockTogetherMakeItFull) {
  const std::vector<MaskSlice> halves = {{.q_begin = 0, .q_end = 8, .k_begin = 0, .k_end = 5},
                                         {.q_begin = 0, .q_end = 8, .k_begin = 5, .k_end = 8}};
  const BlockLists lists = make_block_lists(halves, square(8, 8));
  EXPECT_EQ(lists.counts, std::vector<std::int32_t>{0});
  EXPECT_EQ(lists.full_counts, std::vector<std::int32_t>{1});
}

// Tiles are stored for what differs, so a causal mask of any length has one.
TEST(BlockLists, LongMasksHaveFewTiles) {
  const std::vector<std::int64_t> one = {32768};
  const BlockLists causal = make_block_lists(masks::documents(one, true), square(32768, 128));
  EXPECT_EQ(causal.tile_count(), 1);
  EXPECT_EQ(causal.full_slots, 255);

  const std::vector<std::int64_t> lengths(64, 512);
  const BlockLists aligned = make_block_lists(masks::documents(lengths, false), square(32768, 128));
  EXPECT_EQ(aligned.counts, std::vector<std::int32_t>(256));
  EXPECT_EQ(aligned.full_slots, 4);

  const std::array<std::int64_t, 2> image = {64, 64}, kernel = {7, 7};
  const BlockLists points = make_block_lists(masks::neighbourhood(image, kernel), square(4096, 128));
  EXPECT_LT(points.tile_count(), 20);
}

TEST(Masks, DocumentsSeeThemselvesAlone) {
  const std::vector<std::int64_t> lengths = {5, 0, 20, 1, 40};
  std::vector<std::int64_t> document;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    document.insert(document.end(), static_cast<std::size_t>(lengths[n]), static_cast<std::int64_t>(n));
  }
  const auto same = [&](std::int64_t i, std::int64_t j) {
    return document[static_cast<std::size_t>(i)] == document[static_cast<std::size_t>(j)];
  };
  expect_mask(masks::documents(lengths, false), square(66), same);
  expect_mask(masks::documents(lengths, true), square(66),
              [&](std::int64_t i, std::int64_t j) { return same(i, j) && j <= i; });
}

TEST(Masks, APrefixIsSeenByAllAndTheRestIsCausal) {
  for (const std::int64_t prefix : {0, 1, 16, 23, 50}) {
    expect_mask(masks::prefix(50, prefix), square(50),
                [&](std::int64_t i, std::int64_t j) { return j < prefix || j <= i; });
  }
}

TEST(Masks, ResponsesSeeTheirPromptAndThemselves) {
  const std::vector<std::int64_t> responses = {7, 30, 0, 10};
  const auto response = [&](std::int64_t i) {  // 0: the prompt
    std::int64_t end = 20, n = 0;
    while (i >= end) end += responses[static_cast<std::size_t>(n++)];
    return n;
  };
  expect_mask(masks::shared_prompt(20, responses), square(67), [&](std::int64_t i, std::int64_t j) {
    return j <= i && (j < 20 || response(i) == response(j));
  });
}

TEST(Masks, BlocksSeeThemselvesAndThoseBefore) {
  for (const std::int64_t block : {1, 7, 16, 1000}) {
    expect_mask(masks::block_causal(50, block), square(50),
                [&](std::int64_t i, std::int64_t j) { return j / block <= i / block; });
  }
}

struct Neighbourhood {
  std::vector<std::int64_t> extents, kernel;

  std::int64_t points() const {
    std::int64_t product = 1;
    for (const std::int64_t extent : extents) product *= extent;
    return product;
  }
  bool sees(std::int64_t i, std::int64_t j) const {
    for (std::size_t dim = extents.size(); dim-- > 0;) {
      const std::int64_t extent = extents[dim], size = kernel[dim];
      const std::int64_t first = std::clamp<std::int64_t>(i % extent - size / 2, 0, extent - size);
      if (j % extent < first || j % extent >= first + size) return false;
      i /= extent;
      j /= extent;
    }
    return true;
  }
};

TEST(Masks, NeighbourhoodsAreBoxesThatStayInside) {
  const Neighbourhood cases[] = {{{40}, {7}},      {{9, 11}, {3, 5}}, {{9, 11}, {9, 11}},
                                 {{8, 6}, {4, 2}}, {{1, 13}, {1, 1}}, {{5, 4, 6}, {3, 4, 3}},
                                 {{20}, {20}},     {{3, 3}, {2, 3}}};
  for (const Neighbourhood& n : cases) {
    expect_mask(masks::neighbourhood(n.extents, n.kernel), square(n.points()),
                [&n](std::int64_t i, std::int64_t j) { return n.sees(i, j); });
  }
}

TEST(Masks, BadArgumentsAreNamed) {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(message([] { masks::documents(Sizes{3, -1}, false); }),
            "lengths: expected 0 or above and below 2^31, got -1");
  EXPECT_EQ(message([] { masks::documents(Sizes{1LL << 30, 1LL << 30}, false); }),
            "lengths: expected 0 or above and below 2^31, got 2147483648");
  EXPECT_EQ(message([] { masks::prefix(8, 9); }), "prefix: expected a number from 0 to the length, 8, got 9");
  EXPECT_EQ(message([] { masks::block_causal(8, 0); }), "block: expected 1 or above, got 0");
  EXPECT_EQ(message([] { masks::neighbourhood(Sizes{8, 8}, Sizes{3}); }),
            "kernel: expected as many numbers as extents, 2, got 1");
  EXPECT_EQ(message([] { masks::neighbourhood(Sizes{8, 8}, Sizes{3, 9}); }),
            "kernel: expected a number from 1 to the extent, 8, got 9");
  EXPECT_EQ(message([] { make_block_lists(masks::documents(Sizes{9}, false), square(8)); }),
            "slices.q_begin: expected a range within 0 to 8, got 0 to 9");
  EXPECT_EQ(message([] { make_block_lists({}, square(8, 0)); }), "block_q: expected 1 or above, got 0");
  const std::vector<MaskSlice> crossed = {
      {.q_begin = 0, .q_end = 8, .k_begin = 0, .k_end = 8, .lowest = 1, .highest = 0}};
  EXPECT_EQ(message([&] { make_block_lists(crossed, square(8)); }),
            "slices.lowest: expected at most highest, 0, got 1");
}

}  // namespace
}  // namespace tilewise::test::block_lists_test
