#include "core/overlap.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "support/random.h"

namespace tilewise {
namespace {

using Extents = std::vector<std::int64_t>;

alignas(64) std::array<std::byte, 4096> arena;

// A view into the arena that starts `offset` elements into its middle.
Tensor at(std::int64_t offset, const Extents& shape, const Extents& strides, DType dtype = DType::f32) {
  return Tensor(arena.data() + 2048 + offset * static_cast<std::int64_t>(size_of(dtype)), dtype, shape,
                strides);
}

// Calls body with the address of every element.
template <typename Body>
void for_each_element(const Tensor& tensor, const Body& body) {
  Extents index(static_cast<std::size_t>(tensor.rank));
  for (std::int64_t n = 0; n < tensor.size(); ++n) {
    std::int64_t rest = n;
    std::int64_t offset = 0;
    for (int dim = tensor.rank; dim-- > 0;) {
      offset += rest % tensor.extent(dim) * tensor.stride(dim);
      rest /= tensor.extent(dim);
    }
    body(reinterpret_cast<std::intptr_t>(tensor.data) +
         offset * static_cast<std::int64_t>(size_of(tensor.dtype)));
  }
}

std::set<std::intptr_t> bytes_of(const Tensor& tensor) {
  std::set<std::intptr_t> bytes;
  for_each_element(tensor, [&](std::intptr_t address) {
    for (std::size_t byte = 0; byte < size_of(tensor.dtype); ++byte) {
      bytes.insert(address + static_cast<std::intptr_t>(byte));
    }
  });
  return bytes;
}

bool really_overlap(const Tensor& a, const Tensor& b) {
  const std::set<std::intptr_t> bytes = bytes_of(a);
  for (const std::intptr_t byte : bytes_of(b)) {
    if (bytes.contains(byte)) return true;
  }
  return false;
}

bool really_overlaps_itself(const Tensor& tensor) {
  return bytes_of(tensor).size() != static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype);
}

std::string describe(const Tensor& tensor) {
  std::string text = to_string(tensor) + " at " +
                     std::to_string(static_cast<const std::byte*>(tensor.data) - arena.data()) + " strides";
  for (int dim = 0; dim < tensor.rank; ++dim) text += " " + std::to_string(tensor.stride(dim));
  return text;
}

TEST(MayOverlap, SlicesOfAPackedQkvBufferAreApart) {
  // [B 2, S 3, (q, k, v) 3, H 2, D 4], each seen as [B, H, S, D].
  const Extents shape{2, 2, 3, 4}, strides{72, 4, 24, 1};
  const Tensor q = at(0, shape, strides), k = at(8, shape, strides), v = at(16, shape, strides);
  EXPECT_FALSE(may_overlap(q, k));
  EXPECT_FALSE(may_overlap(k, q));
  EXPECT_FALSE(may_overlap(q, v));
  EXPECT_FALSE(may_overlap(k, v));
  EXPECT_TRUE(may_overlap(q, q));
}

// A token's row of Hq query heads and Hkv key and value heads, in each order of the three.
TEST(MayOverlap, SlicesOfAPackedGqaBufferAreApart) {
  constexpr std::int64_t heads = 6, heads_kv = 2, dim = 4, token = (heads + 2 * heads_kv) * dim;
  const Extents strides{3 * token, dim, token, 1};
  const Extents shape_q{2, heads, 3, dim}, shape_kv{2, heads_kv, 3, dim};
  {
    const Tensor q = at(0, shape_q, strides), k = at(heads * dim, shape_kv, strides);
    const Tensor v = at((heads + heads_kv) * dim, shape_kv, strides);
    EXPECT_FALSE(may_overlap(q, k));
    EXPECT_FALSE(may_overlap(q, v));
    EXPECT_FALSE(may_overlap(k, v));
  }
  {
    const Tensor k = at(0, shape_kv, strides), v = at(heads_kv * dim, shape_kv, strides);
    const Tensor q = at(2 * heads_kv * dim, shape_q, strides);
    EXPECT_FALSE(may_overlap(q, k));
    EXPECT_FALSE(may_overlap(k, q));
    EXPECT_FALSE(may_overlap(q, v));
    EXPECT_FALSE(may_overlap(v, q));
  }
}

TEST(MayOverlap, HeadsPaddedApartInOneRowAreApart) {
  const Extents shape{1, 2, 5, 3};
  EXPECT_FALSE(may_overlap(at(0, shape, {80, 8, 16, 1}), at(3, shape, {80, 8, 16, 1})));
  EXPECT_TRUE(may_overlap(at(0, shape, {80, 8, 16, 1}), at(2, shape, {80, 8, 16, 1})));
}

TEST(MayOverlap, ColumnsOfDifferentWidthsInOneBufferAreApart) {
  // [B 2, H 2, S 3, D 4 + Dv 6]
  const Extents strides{60, 30, 10, 1};
  const Tensor k = at(0, {2, 2, 3, 4}, strides), v = at(4, {2, 2, 3, 6}, strides);
  EXPECT_FALSE(may_overlap(k, v));
  EXPECT_FALSE(may_overlap(v, k));
  EXPECT_TRUE(may_overlap(at(0, {2, 2, 3, 5}, strides), v));
  EXPECT_TRUE(may_overlap(v, at(0, {2, 2, 3, 5}, strides)));
  EXPECT_TRUE(may_overlap(k, at(4, {2, 2, 3, 7}, strides)));  // runs into the next row
}

// A token's row holds all heads of k, then all heads of v: their heads are different strides apart.
TEST(MayOverlap, HeadsOfDifferentWidthsInOneRowAreApart) {
  // [B 2, S 3, H 2 * D 4 + H 2 * Dv 6]
  const Tensor k = at(0, {2, 2, 3, 4}, {60, 4, 20, 1});
  EXPECT_FALSE(may_overlap(k, at(8, {2, 2, 3, 6}, {60, 6, 20, 1})));
  EXPECT_FALSE(may_overlap(at(8, {2, 2, 3, 6}, {60, 6, 20, 1}), k));
  EXPECT_TRUE(may_overlap(k, at(7, {2, 2, 3, 6}, {60, 6, 20, 1})));
  EXPECT_TRUE(may_overlap(k, at(9, {2, 2, 3, 6}, {60, 6, 20, 1})));
}

TEST(MayOverlap, AStatisticInThePaddingOfRowsIsApart) {
  const Tensor o = at(0, {2, 4, 3, 6}, {96, 24, 8, 1});
  EXPECT_FALSE(may_overlap(o, at(6, {2, 4, 3}, {96, 24, 8})));
  EXPECT_FALSE(may_overlap(o, at(7, {2, 4, 3}, {96, 24, 8})));
  EXPECT_TRUE(may_overlap(o, at(5, {2, 4, 3}, {96, 24, 8})));
  EXPECT_TRUE(may_overlap(o, at(8, {2, 4, 3}, {96, 24, 8})));
  EXPECT_FALSE(may_overlap(at(0, {2, 5, 2}, {20, 4, 1}, DType::f16), at(1, {2, 5}, {10, 2}, DType::f32)));
  EXPECT_TRUE(may_overlap(at(0, {2, 5, 3}, {20, 4, 1}, DType::f16), at(1, {2, 5}, {10, 2}, DType::f32)));
}

TEST(MayOverlap, NegativeStridesCountAsTheirPlacesDo) {
  // Rows of 4 in a buffer with rows of 8, from the last to the first.
  const Tensor left = at(0, {5, 4}, {8, 1}), right = at(4, {5, 4}, {8, 1});
  const Tensor left_back = at(32, {5, 4}, {-8, 1}), right_back = at(36, {5, 4}, {-8, 1});
  EXPECT_FALSE(may_overlap(left, right_back));
  EXPECT_FALSE(may_overlap(right_back, left));
  EXPECT_FALSE(may_overlap(left_back, right_back));
  EXPECT_FALSE(may_overlap(left_back, right));
  EXPECT_TRUE(may_overlap(left, left_back));
  EXPECT_TRUE(may_overlap(right_back, right));
  EXPECT_TRUE(may_overlap(left, at(35, {5, 4}, {-8, 1})));
  EXPECT_FALSE(may_overlap(at(0, {4}, {1}), at(7, {4}, {-1})));
  EXPECT_TRUE(may_overlap(at(0, {4}, {1}), at(6, {4}, {-1})));
}

// Sums of these strides stay within a few thousand elements of a multiple of a million, so that a view half a
// million off touches nothing. To find out takes longer than a check may.
TEST(MayOverlap, WhatWouldTakeLongToTellCountsAsOverlap) {
  const Extents shape{100, 100};
  const Extents odd{1'000'003, 1'000'033}, others{1'000'037, 1'000'039};
  EXPECT_TRUE(may_overlap(at(0, shape, odd), at(500'000, shape, others)));
}

TEST(MayOverlap, StridesBeyondAllMemoryCountAsOverlap) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const Tensor whole = at(0, {4, 8}, {8, 1});
  EXPECT_TRUE(may_overlap(whole, at(4000, {3}, {most})));
  EXPECT_TRUE(may_overlap(at(4000, {3}, {-most - 1}), whole));
  EXPECT_TRUE(overlaps_itself(at(4000, {3}, {most})));
  EXPECT_FALSE(may_overlap(whole, at(4000, {1}, {most})));
}

TEST(MayOverlap, FindsIdenticalShiftedAndContainedViews) {
  const Tensor whole = at(0, {4, 8}, {8, 1});
  EXPECT_TRUE(may_overlap(whole, whole));
  EXPECT_TRUE(may_overlap(whole, at(31, {4, 8}, {8, 1})));
  EXPECT_TRUE(may_overlap(at(31, {4, 8}, {8, 1}), whole));
  EXPECT_TRUE(may_overlap(whole, at(13, {1, 1}, {8, 1})));
  EXPECT_TRUE(may_overlap(whole, at(13, {1}, {1})));
  EXPECT_TRUE(may_overlap(whole, at(-3, {4}, {1})));
}

TEST(MayOverlap, AdjacentRangesAreApart) {
  const Tensor whole = at(0, {4, 8}, {8, 1});
  EXPECT_FALSE(may_overlap(whole, at(32, {4, 8}, {8, 1})));
  EXPECT_FALSE(may_overlap(whole, at(-32, {4, 8}, {8, 1})));
  EXPECT_FALSE(may_overlap(whole, at(32, {7}, {1})));
  EXPECT_FALSE(may_overlap(at(0, {8}, {1}, DType::f16), at(4, {3}, {1}, DType::i32)));
}

TEST(MayOverlap, EmptyViewsOverlapNothing) {
  const Tensor whole = at(0, {4, 8}, {8, 1});
  EXPECT_FALSE(may_overlap(whole, at(8, {4, 0}, {8, 1})));
  EXPECT_FALSE(may_overlap(at(8, {0, 8}, {8, 1}), whole));
  EXPECT_FALSE(may_overlap(Tensor::of(static_cast<float*>(nullptr), {0}), whole));
}

TEST(MayOverlap, ByteOffsetsWithinAnElementOverlap) {
  const Tensor a = at(0, {4}, {2}), b = Tensor(arena.data() + 2048 + 2, DType::f32, Extents{4}, Extents{2});
  EXPECT_TRUE(may_overlap(a, b));
}

TEST(MayOverlap, TypesThatDifferOverlapWhereTheirBytesDo) {
  EXPECT_TRUE(may_overlap(at(0, {4}, {1}, DType::f32), at(7, {2}, {1}, DType::f16)));
  EXPECT_FALSE(may_overlap(at(0, {4}, {1}, DType::f32), at(8, {2}, {1}, DType::f16)));
}

TEST(MayOverlap, IsExactForSmallViewsOfAnyStrides) {
  constexpr std::uint64_t seed = 31;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  test::Random random(seed);
  int overlaps = 0;
  const auto random_view = [&] {
    const auto rank = static_cast<std::size_t>(random.between(1, 3));
    Extents shape(rank), strides(rank);
    for (std::int64_t& extent : shape) extent = random.between(random.chance(0.05) ? 0 : 1, 4);
    for (std::int64_t& stride : strides) stride = random.between(-6, 20);
    return at(random.between(-30, 30), shape, strides, random.pick({DType::f32, DType::f32, DType::f16}));
  };
  for (int n = 0; n < 20'000; ++n) {
    const Tensor a = random_view();
    Tensor b = random_view();
    if (random.chance(0.5)) {  // the same layout elsewhere
      b.dtype = a.dtype;
      b.rank = a.rank;
      b.strides = a.strides;
      if (random.chance(0.5)) b.shape = a.shape;
      for (int dim = 0; dim < b.rank; ++dim) b.shape[static_cast<std::size_t>(dim)] += b.extent(dim) == 0;
    }
    const bool truth = really_overlap(a, b);
    overlaps += truth;
    ASSERT_EQ(may_overlap(a, b), truth) << describe(a) << " and " << describe(b);
    ASSERT_EQ(may_overlap(b, a), truth) << describe(b) << " and " << describe(a);
  }
  EXPECT_GT(overlaps, 2000);
  EXPECT_LT(overlaps, 18'000);
}

// A slice of a row-major buffer: its own start, extents and directions, steps common to all slices.
Tensor random_slice(test::Random& random, const Extents& buffer, const Extents& steps) {
  Extents shape(buffer.size()), strides(buffer.size());
  std::int64_t offset = 0, stride = 1;
  for (std::size_t dim = buffer.size(); dim-- > 0;) {
    const std::int64_t first = random.between(0, buffer[dim] - 1);
    shape[dim] = random.between(1, (buffer[dim] - first + steps[dim] - 1) / steps[dim]);
    strides[dim] = steps[dim] * stride;
    offset += first * stride;
    if (random.chance(0.2)) {
      offset += (shape[dim] - 1) * strides[dim];
      strides[dim] = -strides[dim];
    }
    stride *= buffer[dim];
  }
  return at(offset, shape, strides);
}

TEST(MayOverlap, IsExactForSlicesOfOneBuffer) {
  constexpr std::uint64_t seed = 32;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  test::Random random(seed);
  int overlaps = 0, wrong = 0;
  std::string first;
  for (int n = 0; n < 20'000; ++n) {
    Extents buffer(static_cast<std::size_t>(random.between(1, 4))), steps;
    for (std::int64_t& extent : buffer) extent = random.between(1, 5);
    for (std::size_t dim = 0; dim < buffer.size(); ++dim) steps.push_back(random.pick({1, 1, 1, 2}));
    const Tensor a = random_slice(random, buffer, steps), b = random_slice(random, buffer, steps);
    const bool truth = really_overlap(a, b);
    overlaps += truth;
    if (may_overlap(a, b) == truth) continue;
    if (wrong++ == 0) {
      first = describe(a) + " and " + describe(b) + (truth ? " overlap" : " are apart");
    }
  }
  EXPECT_EQ(wrong, 0) << "the first: " << first;
  EXPECT_GT(overlaps, 2000);
  EXPECT_LT(overlaps, 18'000);
}

TEST(OverlapsItself, ZeroStridesAndRowsInsideOneAnother) {
  EXPECT_TRUE(overlaps_itself(at(0, {2, 4}, {0, 1})));
  EXPECT_TRUE(overlaps_itself(at(0, {4, 4}, {2, 1})));
  EXPECT_TRUE(overlaps_itself(at(0, {4}, {0})));
  EXPECT_FALSE(overlaps_itself(at(0, {1, 4}, {0, 1})));
  EXPECT_FALSE(overlaps_itself(at(0, {4, 4}, {4, 1})));
  EXPECT_FALSE(overlaps_itself(at(0, {4, 4}, {1, 4})));
  EXPECT_FALSE(overlaps_itself(at(0, {0, 4}, {0, 1})));
}

TEST(OverlapsItself, NegativeStridesAreApartWhereTheirSizesAre) {
  EXPECT_FALSE(overlaps_itself(at(0, {4}, {-1})));
  EXPECT_FALSE(overlaps_itself(at(0, {4, 4}, {-4, 1})));
  EXPECT_FALSE(overlaps_itself(at(0, {2, 3, 4}, {12, -4, 1})));
  EXPECT_FALSE(overlaps_itself(at(0, {2, 3, 4}, {-4, -8, -1})));
  EXPECT_TRUE(overlaps_itself(at(0, {4, 4}, {-3, 1})));
  EXPECT_TRUE(overlaps_itself(at(0, {4, 4}, {1, -1})));
}

TEST(OverlapsItself, DimensionsThatInterleaveAreApart) {
  EXPECT_FALSE(overlaps_itself(at(0, {3, 2}, {2, 3})));
  EXPECT_FALSE(overlaps_itself(at(0, {3, 2}, {-2, 3})));
  EXPECT_TRUE(overlaps_itself(at(0, {4, 3}, {2, 3})));
}

TEST(OverlapsItself, IsExactForSmallViewsOfAnyStrides) {
  constexpr std::uint64_t seed = 33;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  test::Random random(seed);
  int overlaps = 0;
  for (int n = 0; n < 10'000; ++n) {
    const auto rank = static_cast<std::size_t>(random.between(1, 4));
    Extents shape(rank), strides(rank);
    for (std::int64_t& extent : shape) extent = random.between(0, 4);
    for (std::int64_t& stride : strides) stride = random.between(-4, 12);
    const Tensor any = at(0, shape, strides);
    const bool truth = really_overlaps_itself(any);
    overlaps += truth;
    ASSERT_EQ(overlaps_itself(any), truth) << describe(any);
    const Extents buffer{4, 3, 5};
    const Tensor slice = random_slice(random, buffer, {1, random.pick({1, 2}), random.pick({1, 2, 3})});
    ASSERT_FALSE(overlaps_itself(slice)) << describe(slice);
  }
  EXPECT_GT(overlaps, 1000);
}

}  // namespace
}  // namespace tilewise
