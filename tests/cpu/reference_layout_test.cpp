#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/reference_case.h"

// One problem told in two ways gives one answer: layouts, invariances, empty problems.
namespace tilewise::test::reference_layout_test {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

TEST(ReferenceLayout, BlockMaskEqualsTheDenseMaskItStandsFor) {
  for (const std::uint64_t seed : {101u, 102u, 103u, 104u}) {
    SeededRandom random(seed);
    for (const bool with_tiles : {false, true}) {
      for (const bool per_head : {false, true}) {
        Case c = random_case(random, {.sq = 7, .sk = 8});
        c.block_q = 3;
        c.block_k = 2;
        const Buffer mask = add_random_blocks(c, random, per_head, with_tiles);
        const CaseResults blocks = forward(c);
        c.counts = c.indices = c.full_counts = c.full_indices = c.tile_ids = c.tiles = {};
        c.mask = mask;
        expect_close(blocks, forward(c));
      }
    }
  }
}

TEST(ReferenceLayout, PackedEqualsOneCallASequence) {
  SeededRandom random(102);
  const std::vector<std::int64_t> starts_q = {0, 3, 3, 7, 8}, starts_k = {0, 2, 6, 6, 11};
  Case c;
  c.q = random_buffer(random, {10, 4, 3});
  c.k = random_buffer(random, {12, 2, 3});
  c.v = random_buffer(random, {12, 2, 2});
  c.cumulative_q = indices_buffer({5}, {starts_q.begin(), starts_q.end()});
  c.cumulative_k = indices_buffer({5}, {starts_k.begin(), starts_k.end()});
  c.max_length_q = 4;
  c.max_length_k = 9;
  c.alibi_slopes = random_buffer(random, {4, 4});
  c.sinks = random_buffer(random, {4});
  c.options.causal = true;
  c.options.alignment = Alignment::bottom_right;
  const CaseResults packed = forward(c);

  for (std::size_t n = 0; n < 4; ++n) {
    SCOPED_TRACE(testing::Message() << "sequence " << n);
    const std::int64_t first_q = starts_q[n], first_k = starts_k[n];
    const std::int64_t sq = starts_q[n + 1] - first_q, sk = starts_k[n + 1] - first_k;
    Case one;
    one.options = c.options;
    one.q = tabulate({1, 4, sq, 3}, [&](const Shape& x) { return c.q.at(first_q + x[2], x[1], x[3]); });
    one.k = tabulate({1, 2, sk, 3}, [&](const Shape& x) { return c.k.at(first_k + x[2], x[1], x[3]); });
    one.v = tabulate({1, 2, sk, 2}, [&](const Shape& x) { return c.v.at(first_k + x[2], x[1], x[3]); });
    one.alibi_slopes = tabulate({4}, [&](const Shape& x) { return c.alibi_slopes.at(n, x[0]); });
    one.sinks = c.sinks;
    const CaseResults part{
        tabulate({1, 4, sq, 2}, [&](const Shape& x) { return packed.o.at(first_q + x[2], x[1], x[3]); }),
        tabulate({1, 4, sq}, [&](const Shape& x) { return packed.lse.at(x[1], first_q + x[2]); })};
    expect_close(part, forward(one));
  }
  for (std::int64_t h = 0; h < 4; ++h) {  // rows that no sequence owns
    for (std::int64_t row : {8, 9}) {
      EXPECT_EQ(packed.lse.at(h, row), none);
      EXPECT_EQ(packed.o.at(row, h, 0), 0);
      EXPECT_EQ(packed.o.at(row, h, 1), 0);
    }
  }
}

// The dropout position of a packed query is (sequence, head, query and key within the sequence).
TEST(ReferenceLayout, PackedDropoutEqualsThatOfABatch) {
  SeededRandom random(103);
  Case c = random_case(random, {.b = 3, .sq = 4, .sk = 6});
  c.options.dropout = {.probability = 0.5f, .seed = 9, .offset = 1};
  const CaseResults dense = forward(c);
  Case packed;
  packed.options = c.options;
  const auto rows = [](const Buffer& source) {
    const std::int64_t length = source.extent(2);
    return tabulate({source.extent(0) * length, source.extent(1), source.extent(3)},
                    [&](const Shape& x) { return source.at(x[0] / length, x[1], x[0] % length, x[2]); });
  };
  packed.q = rows(c.q);
  packed.k = rows(c.k);
  packed.v = rows(c.v);
  packed.cumulative_q = indices_buffer({4}, {0, 4, 8, 12});
  packed.cumulative_k = indices_buffer({4}, {0, 6, 12, 18});
  packed.max_length_q = 4;
  packed.max_length_k = 6;
  expect_close(forward(packed).o, rows(dense.o), "o");
}

TEST(ReferenceLayout, PagedEqualsDenseForAnyPageSize) {
  SeededRandom random(104);
  for (const std::int64_t page : {1, 2, 3, 7, 16}) {
    SCOPED_TRACE(testing::Message() << "page " << page);
    Case c = random_case(random, {.b = 2, .sq = 3, .sk = 7});
    c.key_lengths = indices_buffer({2}, {7, 4});
    c.options.causal = true;
    c.options.alignment = Alignment::bottom_right;
    const CaseResults dense = forward(c);

    const std::int64_t slots = (7 + page - 1) / page;
    std::vector<std::int64_t> ids(static_cast<std::size_t>(2 * slots));
    std::iota(ids.begin(), ids.end(), 1);  // page 0 is nobody's
    random.shuffle(ids);
    Case paged;
    paged.options = c.options;
    paged.q = c.q;
    paged.key_lengths = c.key_lengths;
    paged.page_table = indices_buffer({2, slots}, {ids.begin(), ids.end()});
    const auto spread = [&](const Buffer& source) {
      Buffer pages(DType::f64, {2 * slots + 1, 2, page, source.extent(3)});
      pages.fill(nan_value);  // what no key fills must not be read
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t j = 0; j < (b == 0 ? 7 : 4); ++j) {
          const std::int64_t id = ids[static_cast<std::size_t>(b * slots + j / page)];
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t d = 0; d < source.extent(3); ++d) {
              pages.set({id, h, j % page, d}, source.at(b, h, j, d));
            }
          }
        }
      }
      return pages;
    };
    paged.k = spread(c.k);
    paged.v = spread(c.v);
    expect_close(forward(paged), dense);
  }
}

TEST(ReferenceLayout, KeyLengthsEqualASlice) {
  SeededRandom random(105);
  for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
    Case c = random_case(random, {.b = 4});
    c.alibi_slopes = random_buffer(random, {4});
    c.mask = random_buffer(random, {5});
    c.options.window = {.left = 1, .right = 1};
    c.options.alignment = alignment;
    const std::vector<double> lengths = {5, 3, 1, 0};
    c.key_lengths = indices_buffer({4}, lengths);
    const CaseResults whole = forward(c);
    for (std::int64_t b = 0; b < 4; ++b) {
      SCOPED_TRACE(testing::Message() << "entry " << b);
      const auto sk = static_cast<std::int64_t>(lengths[static_cast<std::size_t>(b)]);
      Case one;
      one.options = c.options;
      one.alibi_slopes = c.alibi_slopes;
      one.q = tabulate({1, 4, 3, 3}, [&](const Shape& x) { return c.q.at(b, x[1], x[2], x[3]); });
      one.k = tabulate({1, 2, sk, 3}, [&](const Shape& x) { return c.k.at(b, x[1], x[2], x[3]); });
      one.v = tabulate({1, 2, sk, 2}, [&](const Shape& x) { return c.v.at(b, x[1], x[2], x[3]); });
      one.mask = tabulate({sk}, [&](const Shape& x) { return c.mask.at(x[0]); });
      const CaseResults part{
          tabulate({1, 4, 3, 2}, [&](const Shape& x) { return whole.o.at(b, x[1], x[2], x[3]); }),
          tabulate({1, 4, 3}, [&](const Shape& x) { return whole.lse.at(b, x[1], x[2]); })};
      expect_close(part, forward(one));
    }
  }
}

TEST(ReferenceLayout, SharedHeadsEqualRepeatedKeysAndValues) {
  SeededRandom random(106);
  for (const std::int64_t hkv : {1, 2, 3, 6}) {
    const Case c = random_case(random, {.hq = 6, .hkv = hkv});
    Case repeated = c;
    const auto repeat = [&](const Buffer& source) {
      return tabulate({2, 6, 5, source.extent(3)},
                      [&](const Shape& x) { return source.at(x[0], x[1] * hkv / 6, x[2], x[3]); });
    };
    repeated.k = repeat(c.k);
    repeated.v = repeat(c.v);
    expect_close(forward(c), forward(repeated));
  }
}

TEST(ReferenceLayout, HiddenKeysAreNeverRead) {
  SeededRandom random(107);
  Case c = random_case(random);
  c.mask = tabulate({5}, [](const Shape& x) { return x[0] == 2 ? 0.0 : 1.0; }, DType::boolean);
  c.key_lengths = indices_buffer({2}, {4, 4});
  c.options.dropout = {.probability = 0.3f, .seed = 1, .offset = 0};
  const CaseResults before = forward(c);
  for (const std::int64_t j : {2, 4}) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t d = 0; d < 3; ++d) c.k.set({b, h, j, d}, nan_value);
        for (std::int64_t d = 0; d < 2; ++d) c.v.set({b, h, j, d}, nan_value);
      }
    }
  }
  expect_close(forward(c), before);
}

TEST(ReferenceLayout, StridesDoNotMatter) {
  SeededRandom random(108);
  Case c = random_case(random);
  c.mask = random_buffer(random, {2, 4, 3, 5});
  const CaseResults plain = forward(c);
  const auto moved = [](const Buffer& source, const Placement& placement) {
    Buffer buffer(DType::f64, source.shape(), placement);
    buffer.set_values(source.values());
    return buffer;
  };
  c.q = moved(c.q, {.order = {2, 0, 1, 3}, .padding = {0, 0, 0, 5}, .lead = 1});
  c.k = moved(c.k, {.order = {0, 2, 1, 3}, .flipped = {2}});
  c.v = moved(c.v, {.padding = {1, 2, 3, 4}, .flipped = {0, 1}});
  c.mask = moved(c.mask, {.order = {3, 1, 0, 2}, .flipped = {3}});
  expect_close(forward(c), plain);
}

TEST(ReferenceLayout, NarrowTypesGiveTheRoundedResultOfTheirValues) {
  SeededRandom random(109);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    SCOPED_TRACE(std::string(to_string(dtype)));
    Case wide = random_case(random), narrow = wide;
    for (auto [from, to] : {std::pair(&wide.q, &narrow.q), {&wide.k, &narrow.k}, {&wide.v, &narrow.v}}) {
      *to = Buffer(dtype, from->shape());
      to->set_values(from->values());
      from->set_values(to->values());
    }
    const CaseResults expected = forward(wide), given = forward(narrow);
    Buffer o(dtype, expected.o.shape()), lse(DType::f32, expected.lse.shape());
    o.set_values(expected.o.values());
    lse.set_values(expected.lse.values());
    EXPECT_TRUE(given.o.bytes() == o.bytes());
    EXPECT_TRUE(given.lse.bytes() == lse.bytes());
  }
}

TEST(ReferenceLayout, ThreadsDoNotChangeABit) {
  SeededRandom random(110);
  Case c = random_case(random, {.b = 3, .sq = 9, .sk = 11});
  c.mask = random_buffer(random, {1, 4, 9, 11});
  const Buffer d_o = random_buffer(random, {3, 4, 9, 2});
  const CaseResults one = forward(c);
  const Gradients one_back = backward(c, d_o, {});
  for (const int threads : {2, 5}) {
    const Context context{.parallel_for = openmp_parallel_for(threads)};
    EXPECT_TRUE(forward(c, context).o.bytes() == one.o.bytes());
    const Gradients back = backward(c, d_o, {}, context);
    EXPECT_TRUE(back.dq.bytes() == one_back.dq.bytes());
    EXPECT_TRUE(back.dk.bytes() == one_back.dk.bytes());
    EXPECT_TRUE(back.dv.bytes() == one_back.dv.bytes());
    EXPECT_TRUE(back.dmask.bytes() == one_back.dmask.bytes());
  }
}

}  // namespace
}  // namespace tilewise::test::reference_layout_test
