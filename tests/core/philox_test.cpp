#include "core/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "attention/dropout.h"

namespace tilewise {
namespace {

using Words = std::array<std::uint32_t, 4>;

// The known-answer vectors Random123 publishes for philox4x32, 10 rounds.
TEST(Philox, GivesThePublishedVectors) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // The digits of pi.
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, IsAConstantExpression) { static_assert(philox({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5); }

// Which of a range of positions are kept, as one comparable value.
std::vector<bool> kept(const Dropout& dropout, std::uint32_t head, std::uint32_t row,
                       std::uint32_t columns = 256) {
  const DropoutMask mask(dropout);
  std::vector<bool> result(columns);
  for (std::uint32_t j = 0; j < columns; ++j) result[j] = mask.keeps(head, row, j);
  return result;
}

// The formula in the contract, written out: which word of which counter under which key.
TEST(DropoutMask, IsTheDocumentedWordOfTheDocumentedCounter) {
  const Dropout dropout{.probability = 0.25f, .seed = 0x0123456789abcdef, .offset = 0xfedcba9876543210};
  const DropoutMask mask(dropout);
  EXPECT_EQ(mask.threshold, 0x4000u << 16);
  EXPECT_EQ(mask.keep_scale, static_cast<float>(4.0 / 3.0));
  // The scale is that of the rounded probability, so that the mean stays what it was.
  EXPECT_EQ(DropoutMask({.probability = 0.1f}).keep_scale, static_cast<float>(65536.0 / (65536 - 6554)));
  const PhiloxKey key{0x89abcdef, 0x01234567 ^ 0xfedcba98};
  for (std::uint32_t head : {0u, 5u, 0xffffffffu}) {
    for (std::uint32_t i : {0u, 1u, 1000u, 0x7fffffffu}) {
      for (std::uint32_t j : {0u, 1u, 2u, 3u, 4u, 7u, 8u, 1023u, 0x7fffffffu}) {
        const std::uint32_t word = philox({j / 8, i, head, 0x76543210}, key)[j % 4];
        const std::uint32_t half = j % 8 < 4 ? word & 0xffff : word >> 16;
        EXPECT_EQ(mask.keeps(head, i, j), half >= 0x4000) << head << ' ' << i << ' ' << j;
      }
    }
  }
}

TEST(DropoutMask, KeepsAHalfThatEqualsTheThreshold) {
  DropoutMask mask({.probability = 0.5f, .seed = 1, .offset = 2});
  const std::uint32_t word = philox({1, 7, 3, 2}, {1, 0})[1];  // head 3, query 7, keys 9 and 13
  for (const std::uint32_t key : {9u, 13u}) {
    const std::uint32_t half = key == 9 ? word & 0xffff : word >> 16;
    mask.threshold = half << 16;
    EXPECT_TRUE(mask.keeps(3, 7, key));
    mask.threshold = (half + 1) << 16;
    EXPECT_FALSE(mask.keeps(3, 7, key));
  }
}

TEST(DropoutMask, KeepsTheAskedShare) {
  constexpr std::uint32_t heads = 4, rows = 64, columns = 1024;
  constexpr double count = heads * rows * columns;
  for (const float probability : {0.05f, 0.1f, 0.5f, 0.9f}) {
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      const DropoutMask mask({.probability = probability, .seed = seed, .offset = 7});
      double dropped = 0;
      for (std::uint32_t h = 0; h < heads; ++h) {
        for (std::uint32_t i = 0; i < rows; ++i) {
          for (std::uint32_t j = 0; j < columns; ++j) dropped += mask.keeps(h, i, j) ? 0 : 1;
        }
      }
      const double p = static_cast<double>(probability);
      const double deviation = std::sqrt(count * p * (1 - p));
      EXPECT_NEAR(dropped, count * p, 4 * deviation) << "probability " << probability << " seed " << seed;
    }
  }
}

// Neighbours in every direction are as often equal as independent coins are.
TEST(DropoutMask, NeighboursAreIndependent) {
  constexpr std::uint32_t rows = 256, columns = 256;
  const DropoutMask mask({.probability = 0.5f, .seed = 11, .offset = 0});
  double same_column = 0, same_row = 0, same_head = 0;
  for (std::uint32_t i = 0; i < rows; ++i) {
    for (std::uint32_t j = 0; j < columns; ++j) {
      const bool here = mask.keeps(0, i, j);
      same_row += here == mask.keeps(0, i, j + 1);
      same_column += here == mask.keeps(0, i + 1, j);
      same_head += here == mask.keeps(1, i, j);
    }
  }
  constexpr double count = rows * columns;
  const double deviation = std::sqrt(count) / 2;
  EXPECT_NEAR(same_row, count / 2, 4 * deviation);
  EXPECT_NEAR(same_column, count / 2, 4 * deviation);
  EXPECT_NEAR(same_head, count / 2, 4 * deviation);
}

TEST(DropoutMask, EveryPartOfThePositionAndTheStateMatters) {
  const Dropout base{.probability = 0.5f, .seed = 42, .offset = 0};
  std::set<std::vector<bool>> masks;
  std::size_t count = 0;
  const auto add = [&](const Dropout& dropout, std::uint32_t head, std::uint32_t row) {
    masks.insert(kept(dropout, head, row));
    EXPECT_EQ(masks.size(), ++count) << "seed " << dropout.seed << " offset " << dropout.offset << " head "
                                     << head << " row " << row;
  };
  for (std::uint32_t head : {0u, 1u, 2u, 65536u, 0xffffffffu}) {
    for (std::uint32_t row : {0u, 1u, 2u, 65536u}) add(base, head, row);
  }
  for (std::uint64_t bit = 0; bit < 64;
       ++bit) {  // both halves of seed and offset are used, up to the last bit
    add({.probability = 0.5f, .seed = 42 ^ (std::uint64_t{1} << bit), .offset = 0}, 0, 0);
    if (bit < 32) add({.probability = 0.5f, .seed = 42, .offset = std::uint64_t{1} << bit}, 0, 0);
  }
}

// The upper half of the offset goes into the key together with the upper half of the seed.
TEST(DropoutMask, TheUpperHalfOfTheOffsetMatters) {
  const auto base = kept({.probability = 0.5f, .seed = 42, .offset = 0}, 0, 0);
  for (std::uint64_t bit = 32; bit < 64; ++bit) {
    EXPECT_NE(kept({.probability = 0.5f, .seed = 42, .offset = std::uint64_t{1} << bit}, 0, 0), base) << bit;
  }
}

TEST(DropoutMask, DropsNothingAtZeroAndAsGoodAsNothingNextToIt) {
  EXPECT_EQ(DropoutMask(Dropout{}).threshold, 0u);
  EXPECT_EQ(DropoutMask(Dropout{}).keep_scale, 1.0f);
  const DropoutMask smallest(
      {.probability = std::numeric_limits<float>::denorm_min(), .seed = 0, .offset = 0});
  EXPECT_EQ(smallest.threshold, 0u);
  EXPECT_EQ(smallest.keep_scale, 1.0f);
  EXPECT_EQ(DropoutMask({.probability = 0x1p-18f, .seed = 0, .offset = 0}).threshold, 0u);
  EXPECT_EQ(DropoutMask({.probability = 0x1p-17f, .seed = 0, .offset = 0}).threshold, 1u << 16);
}

TEST(DropoutMask, LeavesNothingAtOne) {
  const DropoutMask mask({.probability = 1, .seed = 3, .offset = 0});
  EXPECT_EQ(mask.threshold, 0xffffu << 16);
  EXPECT_EQ(mask.keep_scale, 0.0f);  // of the one number in 2^16 that reaches the threshold
}

TEST(DropoutMask, StaysFiniteJustUnderOne) {
  const DropoutMask mask({.probability = std::nextafter(1.0f, 0.0f), .seed = 3, .offset = 0});
  EXPECT_EQ(mask.threshold, 0xffffu << 16);
  EXPECT_EQ(mask.keep_scale, 0x1p16f);
}

TEST(DropoutMask, AHigherProbabilityDropsAllThatALowerOneDoes) {
  const DropoutMask low({.probability = 0.2f, .seed = 9, .offset = 1});
  const DropoutMask high({.probability = 0.6f, .seed = 9, .offset = 1});
  for (std::uint32_t j = 0; j < 4096; ++j) {
    EXPECT_LE(high.keeps(2, 3, j), low.keeps(2, 3, j)) << j;
  }
}

}  // namespace
}  // namespace tilewise
