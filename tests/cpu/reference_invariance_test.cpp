#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/reference_case.h"

// What must not change the answer, or changes it in a known way; and problems with nothing in them.
namespace tilewise::test::reference_invariance_test {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();

TEST(ReferenceInvariance, PermutingTheKeysChangesNothing) {
  for (const std::uint64_t seed : {201u, 202u, 203u}) {
    SeededRandom random(seed);
    Case c = random_case(random, {.sk = 9});
    c.mask =
        tabulate({2, 4, 3, 9}, [&](const Shape&) { return random.chance(0.2) ? none : random.normal(); });
    c.sinks = random_buffer(random, {4});
    const CaseResults before = forward(c);
    std::vector<std::int64_t> order = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    random.shuffle(order);
    const auto permuted = [&](const Buffer& source, std::size_t dim) {
      return tabulate(source.shape(), [&](Shape x) {
        x[dim] = order[static_cast<std::size_t>(x[dim])];
        return source.at(x[0], x[1], x[2], x[3]);
      });
    };
    c.k = permuted(c.k, 2);
    c.v = permuted(c.v, 2);
    c.mask = permuted(c.mask, 3);
    expect_close(forward(c), before);
  }
}

TEST(ReferenceInvariance, AConstantOnAllScoresMovesTheLseAlone) {
  for (const std::uint64_t seed : {204u, 205u, 206u}) {
    SeededRandom random(seed);
    Case c = random_case(random);
    const CaseResults before = forward(c);
    const Buffer shift = random_buffer(random, {2, 4, 3, 1}, 5);
    c.mask = shift;
    const CaseResults after = forward(c);
    expect_close(after.o, before.o, "o");
    expect_close(after.lse,
                 tabulate({2, 4, 3},
                          [&](const Shape& x) {
                            return before.lse.at(x[0], x[1], x[2]) + shift.at(x[0], x[1], x[2], 0);
                          }),
                 "lse");
  }
}

TEST(ReferenceInvariance, AConstantOnAllScoresAndTheSinkMovesTheLseAlone) {
  SeededRandom random(207);
  Case c = random_case(random);
  c.sinks = random_buffer(random, {4});
  const CaseResults before = forward(c);
  c.mask = tabulate({1}, [](const Shape&) { return 2.5; });
  c.sinks = tabulate({4}, [sinks = c.sinks](const Shape& x) { return sinks.at(x[0]) + 2.5; });
  const CaseResults after = forward(c);
  expect_close(after.o, before.o, "o");
  expect_close(after.lse,
               tabulate({2, 4, 3}, [&](const Shape& x) { return before.lse.at(x[0], x[1], x[2]) + 2.5; }),
               "lse");
}

TEST(ReferenceInvariance, PartsOverDisjointKeysMergeByTheirLse) {
  for (const std::uint64_t seed : {208u, 209u, 210u}) {
    SeededRandom random(seed);
    Case c = random_case(random, {.sk = 10});
    c.mask = Buffer(DType::boolean, {2, 4, 3, 10});
    c.mask.fill_random(random);
    const CaseResults whole = forward(c);
    const std::int64_t split = random.between(0, 10);
    const auto part = [&](std::int64_t first, std::int64_t last) {
      Case p = c;
      p.k = tabulate({2, 2, last - first, 3},
                     [&](const Shape& x) { return c.k.at(x[0], x[1], first + x[2], x[3]); });
      p.v = tabulate({2, 2, last - first, 2},
                     [&](const Shape& x) { return c.v.at(x[0], x[1], first + x[2], x[3]); });
      p.mask = tabulate(
          {2, 4, 3, last - first}, [&](const Shape& x) { return c.mask.at(x[0], x[1], x[2], first + x[3]); },
          DType::boolean);
      return forward(p);
    };
    const CaseResults left = part(0, split), right = part(split, 10);
    const auto merged_lse = [&](const Shape& x) {
      const double a = left.lse.at(x[0], x[1], x[2]), b = right.lse.at(x[0], x[1], x[2]);
      return std::log(std::exp(a) + std::exp(b));
    };
    expect_close(tabulate({2, 4, 3}, merged_lse), whole.lse, "lse");
    expect_close(
        tabulate({2, 4, 3, 2},
                 [&](const Shape& x) {
                   const double lse = merged_lse(x);
                   if (lse == none) return 0.0;
                   return left.o.at(x[0], x[1], x[2], x[3]) * std::exp(left.lse.at(x[0], x[1], x[2]) - lse) +
                          right.o.at(x[0], x[1], x[2], x[3]) * std::exp(right.lse.at(x[0], x[1], x[2]) - lse);
                 }),
        whole.o, "o");
  }
}

TEST(ReferenceInvariance, DropoutsSeedMayComeFromMemory) {
  for (const std::string_view kernel : {"reference", "simd"}) {
    SCOPED_TRACE(kernel);
    SeededRandom random(218);
    const DType dtype = kernel == "simd" ? DType::f32 : DType::f64;
    const auto random_rows = [&](const Shape& shape) {
      return tabulate(shape, [&](const Shape&) { return random.normal(); }, dtype);
    };
    Case c;
    c.q = random_rows({2, 4, 9, 8});
    c.k = random_rows({2, 2, 37, 8});
    c.v = random_rows({2, 2, 37, 6});
    const Buffer d_o = random_rows({2, 4, 9, 6});
    c.options.kernel = kernel;
    c.options.dropout = {.probability = 0.4f, .seed = 0xFEDCBA9876543210u, .offset = 0x8000000100000003u};
    const CaseResults by_value = forward(c);
    const Gradients gradients_by_value = backward(c, d_o, {});
    c.dropout_seed = seed_words(c.options.dropout);
    c.options.dropout.seed = 1;  // no longer looked at
    c.options.dropout.offset = 2;
    const CaseResults from_memory = forward(c);
    const Gradients gradients_from_memory = backward(c, d_o, {});
    EXPECT_EQ(from_memory.o.bytes(), by_value.o.bytes());
    EXPECT_EQ(gradients_from_memory.dq.bytes(), gradients_by_value.dq.bytes());
    EXPECT_EQ(gradients_from_memory.dk.bytes(), gradients_by_value.dk.bytes());
    EXPECT_EQ(gradients_from_memory.dv.bytes(), gradients_by_value.dv.bytes());
    c.dropout_seed = {};
    EXPECT_NE(forward(c).o.bytes(), by_value.o.bytes());
  }
}

TEST(ReferenceInvariance, OutputIsLinearInTheValues) {
  SeededRandom random(211);
  Case c = random_case(random);
  c.options.softcap = 2;
  c.options.dropout = {.probability = 0.25f, .seed = 4, .offset = 4};
  const CaseResults first = forward(c);
  const Buffer v = c.v;
  c.v = random_buffer(random, v.shape());
  const CaseResults second = forward(c);
  c.v = tabulate(v.shape(), [v, w = c.v](const Shape& x) {
    return 2 * v.at(x[0], x[1], x[2], x[3]) - 3 * w.at(x[0], x[1], x[2], x[3]);
  });
  expect_close(forward(c).o,
               tabulate(first.o.shape(),
                        [&](const Shape& x) {
                          return 2 * first.o.at(x[0], x[1], x[2], x[3]) -
                                 3 * second.o.at(x[0], x[1], x[2], x[3]);
                        }),
               "o");
}

void expect_all(const Buffer& buffer, double value, const char* what) {
  for (const double element : buffer.values()) ASSERT_EQ(element, value) << what;
}

TEST(ReferenceEmpty, NoKeysGiveZeroMinusInfinityAndZeroGradients) {
  SeededRandom random(212);
  Case c = random_case(random, {.sk = 0});
  c.mask = random_buffer(random, {2, 4, 3, 1});
  const CaseResults results = forward(c);
  expect_all(results.o, 0, "o");
  expect_all(results.lse, none, "lse");
  const Gradients gradients =
      backward(c, random_buffer(random, {2, 4, 3, 2}), random_buffer(random, {2, 4, 3}));
  expect_all(gradients.dq, 0, "dq");
  expect_all(gradients.dmask, 0, "dmask");
}

TEST(ReferenceEmpty, NoQueriesGiveZeroGradientsOfEverythingShared) {
  for (const Sizes& n : {Sizes{.sq = 0}, Sizes{.hq = 0}}) {
    SeededRandom random(213);
    Case c = random_case(random, n);
    c.mask = random_buffer(random, {5});
    c.sinks = random_buffer(random, {n.hq});
    EXPECT_EQ(forward(c).o.size(), 0);
    const Gradients gradients =
        backward(c, random_buffer(random, {n.b, n.hq, n.sq, 2}), random_buffer(random, {n.b, n.hq, n.sq}));
    expect_all(gradients.dk, 0, "dk");
    expect_all(gradients.dv, 0, "dv");
    expect_all(gradients.dmask, 0, "dmask");
    expect_all(gradients.dsinks, 0, "dsinks");
  }
}

TEST(ReferenceEmpty, NoBatchGivesZeroGradientsOfMaskAndSinks) {
  SeededRandom random(214);
  Case c = random_case(random, {.b = 0});
  c.mask = random_buffer(random, {4, 3, 5});
  c.sinks = random_buffer(random, {4});
  EXPECT_EQ(forward(c).o.size(), 0);
  const Gradients gradients = backward(c, Buffer(DType::f64, {0, 4, 3, 2}), {});
  expect_all(gradients.dmask, 0, "dmask");
  expect_all(gradients.dsinks, 0, "dsinks");
}

TEST(ReferenceEmpty, NoHeadsAtAll) {
  SeededRandom random(215);
  const Case c = random_case(random, {.hq = 0, .hkv = 0});
  EXPECT_EQ(forward(c).o.size(), 0);
  EXPECT_EQ(backward(c, Buffer(DType::f64, {2, 0, 3, 2}), {}).dk.size(), 0);
}

TEST(ReferenceEmpty, RowsThatSeeNothingHaveZeroGradientsAndGiveNone) {
  SeededRandom random(216);
  Case c = random_case(random, {.sq = 7});
  c.options.causal = true;
  c.options.alignment = Alignment::bottom_right;
  const Buffer d_o = random_buffer(random, {2, 4, 7, 2}), d_lse = random_buffer(random, {2, 4, 7});
  const Gradients before = backward(c, d_o, d_lse);
  for (std::int64_t i = 0; i < 2; ++i) {  // queries 0 and 1 stand before key 0
    for (std::int64_t d = 0; d < 3; ++d) EXPECT_EQ(before.dq.at(1, 3, i, d), 0);
  }
  EXPECT_NE(before.dq.at(1, 3, 2, 0), before.dq.at(1, 3, 3, 0));
  Buffer other_d_o =
      tabulate(d_o.shape(), [&](const Shape& x) { return x[2] < 2 ? 99.0 : d_o.at(x[0], x[1], x[2], x[3]); });
  const Gradients after = backward(c, other_d_o, d_lse);
  EXPECT_TRUE(after.dk.bytes() == before.dk.bytes());
  EXPECT_TRUE(after.dv.bytes() == before.dv.bytes());
}

TEST(ReferenceEmpty, PackedCallsWithoutSequencesClearTheirOutputs) {
  SeededRandom random(217);
  Case c;
  c.q = random_buffer(random, {3, 4, 3});
  c.k = random_buffer(random, {5, 2, 3});
  c.v = random_buffer(random, {5, 2, 2});
  c.cumulative_q = indices_buffer({1}, {0});
  c.cumulative_k = indices_buffer({1}, {0});
  const CaseResults results = forward(c);
  expect_all(results.o, 0, "o");
  expect_all(results.lse, none, "lse");
  const Gradients gradients = backward(c, random_buffer(random, {3, 4, 2}), {});
  expect_all(gradients.dq, 0, "dq");
  expect_all(gradients.dk, 0, "dk");
  expect_all(gradients.dv, 0, "dv");
}

}  // namespace
}  // namespace tilewise::test::reference_invariance_test
