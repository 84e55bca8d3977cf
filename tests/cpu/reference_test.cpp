#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "attention/dropout.h"
#include "cpu/reference_case.h"

// The reference against closed forms: every part of the score, every way to hide a key.
namespace tilewise::test::reference_test {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();

// Expects the weights and lse of one row to be the softmax of the scores (−inf: hidden), and hidden weights
// to be exactly zero. `o` must come from unit_values.
void expect_row(const CaseResults& results, std::int64_t b, std::int64_t h, std::int64_t i,
                const std::vector<double>& scores, double sink = none) {
  SCOPED_TRACE(testing::Message() << "entry " << b << " head " << h << " query " << i);
  double sum = sink == none ? 0.0 : std::exp(sink);
  for (const double score : scores) sum += std::exp(score);
  EXPECT_TRUE(close(results.lse.at(b, h, i), std::log(sum)))
      << results.lse.at(b, h, i) << " instead of " << std::log(sum);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double weight = results.o.at(b, h, i, j);
    if (scores[j] == none) {
      EXPECT_EQ(weight, 0) << "key " << j;
    } else {
      EXPECT_TRUE(close(weight, std::exp(scores[j]) / sum)) << "key " << j << ": " << weight;
    }
  }
}

// All rows, with score(b, h, i, j).
template <typename Score>
void expect_weights(const Case& c, const Score& score, double sink = none) {
  const CaseResults results = forward(c);
  for (std::int64_t b = 0; b < c.q.extent(0); ++b) {
    for (std::int64_t h = 0; h < c.q.extent(1); ++h) {
      for (std::int64_t i = 0; i < c.q.extent(2); ++i) {
        std::vector<double> scores;
        for (std::int64_t j = 0; j < c.k.extent(2); ++j) scores.push_back(score(b, h, i, j));
        expect_row(results, b, h, i, scores, sink);
      }
    }
  }
}

// Random q and k with unit values.
Case weights_case(Random& random, const Sizes& n = {}) {
  Case c = random_case(random, n);
  c.v = unit_values(n.b, n.hkv, n.sk);
  return c;
}

double product(const Case& c, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const std::int64_t group = c.q.extent(1) / c.k.extent(1);
  double sum = 0;
  for (std::int64_t d = 0; d < c.q.extent(3); ++d) sum += c.q.at(b, h, i, d) * c.k.at(b, h / group, j, d);
  return sum;
}

double scaled(const Case& c, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return product(c, b, h, i, j) / std::sqrt(static_cast<double>(c.q.extent(3)));
}

TEST(Reference, OneKeyGivesItsValueAndItsScore) {
  SeededRandom random(1);
  const Case c = random_case(random, {.sk = 1});
  const CaseResults results = forward(c);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close(results.lse.at(b, h, i), scaled(c, b, h, i, 0)));
        for (std::int64_t d = 0; d < 2; ++d)
          EXPECT_TRUE(close(results.o.at(b, h, i, d), c.v.at(b, h / 2, 0, d)));
      }
    }
  }
}

TEST(Reference, EqualScoresGiveTheMeanOfTheValues) {
  SeededRandom random(2);
  Case c = random_case(random);
  c.q.fill(0);
  const CaseResults results = forward(c);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close(results.lse.at(b, h, i), std::log(5.0)));
        for (std::int64_t d = 0; d < 2; ++d) {
          double mean = 0;
          for (std::int64_t j = 0; j < 5; ++j) mean += c.v.at(b, h / 2, j, d) / 5;
          EXPECT_TRUE(close(results.o.at(b, h, i, d), mean));
        }
      }
    }
  }
}

TEST(Reference, TwoKeysWithLogitsZeroAndLogThree) {
  Case c;
  c.q = tabulate({1, 1, 1, 1}, [](const Shape&) { return 1.0; });
  c.k = tabulate({1, 1, 2, 1}, [](const Shape& x) { return x[2] == 0 ? 0.0 : std::log(3.0); });
  c.v = tabulate({1, 1, 2, 1}, [](const Shape& x) { return x[2] == 0 ? 8.0 : -4.0; });
  const CaseResults results = forward(c);
  EXPECT_TRUE(close(results.o.at(0, 0, 0, 0), 8 * 0.25 - 4 * 0.75));
  EXPECT_TRUE(close(results.lse.at(0, 0, 0), std::log(4.0)));
}

TEST(Reference, ScaleIsOneOverTheRootOfTheHeadDimUnlessGiven) {
  SeededRandom random(3);
  Case c = weights_case(random);
  expect_weights(c, [&](auto b, auto h, auto i, auto j) { return product(c, b, h, i, j) / std::sqrt(3.0); });
  for (const float scale : {0.0f, 0.75f, -1.25f}) {
    c.options.scale = scale;
    expect_weights(c, [&](auto b, auto h, auto i, auto j) {
      return static_cast<double>(scale) * product(c, b, h, i, j);
    });
  }
}

TEST(Reference, SoftcapBendsTheScaledScore) {
  SeededRandom random(4);
  Case c = weights_case(random);
  c.options.softcap = 0.75f;
  expect_weights(
      c, [&](auto b, auto h, auto i, auto j) { return 0.75 * std::tanh(scaled(c, b, h, i, j) / 0.75); });
}

TEST(Reference, AlibiPenalisesTheDistanceFromTheLastAlignedKey) {
  SeededRandom random(5);
  for (const std::int64_t sq : {2, 5, 7}) {
    Case c = weights_case(random, {.sq = sq});
    c.alibi_slopes = random_buffer(random, {4});
    expect_weights(c, [&](auto b, auto h, auto i, auto j) {
      return scaled(c, b, h, i, j) - c.alibi_slopes.at(h) * std::abs(static_cast<double>(i + 5 - sq - j));
    });
    c.alibi_slopes = random_buffer(random, {2, 4});
    c.options.causal = true;  // which moves what is seen, not the distance
    expect_weights(c, [&](auto b, auto h, auto i, auto j) {
      if (j > i) return none;
      return scaled(c, b, h, i, j) - c.alibi_slopes.at(b, h) * std::abs(static_cast<double>(i + 5 - sq - j));
    });
  }
}

TEST(Reference, SinkJoinsTheDenominatorAlone) {
  SeededRandom random(6);
  Case c = weights_case(random, {.hq = 1, .hkv = 1});
  for (const double sink : {-3.0, 0.5, 4.0}) {
    c.sinks = tabulate({1}, [&](const Shape&) { return sink; });
    expect_weights(c, [&](auto b, auto h, auto i, auto j) { return scaled(c, b, h, i, j); }, sink);
  }
  c.sinks.fill(none);  // a sink of nothing is no sink
  expect_weights(c, [&](auto b, auto h, auto i, auto j) { return scaled(c, b, h, i, j); });
}

TEST(Reference, EveryHeadHasItsOwnSink) {
  SeededRandom random(7);
  Case c = weights_case(random);
  c.sinks = random_buffer(random, {4});
  const CaseResults results = forward(c);
  for (std::int64_t h = 0; h < 4; ++h) {
    std::vector<double> scores;
    for (std::int64_t j = 0; j < 5; ++j) scores.push_back(scaled(c, 1, h, 2, j));
    expect_row(results, 1, h, 2, scores, c.sinks.at(h));
  }
}

TEST(Reference, ASinkAloneGivesZeroAndItsLogit) {
  SeededRandom random(8);
  Case c = random_case(random, {.sk = 0});
  c.sinks = random_buffer(random, {4});
  const CaseResults results = forward(c);
  for (std::int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(results.lse.at(0, h, 1), c.sinks.at(h));
    EXPECT_EQ(results.o.at(0, h, 1, 0), 0);
  }
}

// Query lengths on both sides of the key length: bottom-right then leaves rows with nothing to see.
TEST(Reference, CausalAndWindowSeeExactlyTheirBand) {
  SeededRandom random(9);
  using Side = std::optional<std::int64_t>;
  for (const std::int64_t sq : {1, 3, 5, 8}) {
    Case c = weights_case(random, {.sq = sq});
    for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
      for (const bool causal : {false, true}) {
        for (const Side left : {Side(), Side(0), Side(1), Side(3), Side(100)}) {
          for (const Side right : {Side(), Side(0), Side(2), Side(100)}) {
            SCOPED_TRACE(testing::Message()
                         << "Sq " << sq << (causal ? " causal" : "")
                         << (alignment == Alignment::top_left ? " top left" : " bottom right") << " left "
                         << left.value_or(-1) << " right " << right.value_or(-1));
            c.options.alignment = alignment;
            c.options.causal = causal;
            c.options.window = {left, right};
            const std::int64_t shift = alignment == Alignment::top_left ? 0 : 5 - sq;
            expect_weights(c, [&](auto b, auto h, auto i, auto j) {
              const bool hidden = (causal && j > i + shift) || (left && j < i + shift - *left) ||
                                  (right && j > i + shift + *right);
              return hidden ? none : scaled(c, b, h, i, j);
            });
          }
        }
      }
    }
  }
}

TEST(Reference, RowsThatSeeNothingGiveZeroAndMinusInfinity) {
  SeededRandom random(10);
  Case c = random_case(random, {.sq = 8});
  c.options.causal = true;
  c.options.alignment = Alignment::bottom_right;
  const CaseResults results = forward(c);
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(results.lse.at(1, 2, i), none);
    EXPECT_EQ(results.o.at(1, 2, i, 0), 0);
    EXPECT_EQ(results.o.at(1, 2, i, 1), 0);
  }
  EXPECT_NE(results.lse.at(1, 2, 3), none);
}

// The sixteen ways to broadcast four dimensions, and fewer dimensions than four.
std::vector<Shape> mask_shapes() {
  std::vector<Shape> shapes = {{5}, {1}, {3, 5}, {3, 1}, {4, 3, 5}, {4, 1, 1}};
  for (int bits = 0; bits < 16; ++bits) {
    shapes.push_back(
        {(bits & 1) != 0 ? 2 : 1, (bits & 2) != 0 ? 4 : 1, (bits & 4) != 0 ? 3 : 1, (bits & 8) != 0 ? 5 : 1});
  }
  return shapes;
}

double mask_at(const Buffer& mask, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const std::int64_t whole[] = {b, h, i, j};
  const std::vector<double> values = mask.values();
  const Shape& shape = mask.shape();
  std::int64_t offset = 0;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    offset = offset * shape[dim] + (shape[dim] == 1 ? 0 : whole[dim + 4 - shape.size()]);
  }
  return values[static_cast<std::size_t>(offset)];
}

TEST(Reference, BooleanMasksHideAndBroadcast) {
  SeededRandom random(11);
  Case c = weights_case(random);
  for (const Shape& shape : mask_shapes()) {
    c.mask = Buffer(DType::boolean, shape);
    c.mask.fill_random(random);
    expect_weights(c, [&](auto b, auto h, auto i, auto j) {
      return mask_at(c.mask, b, h, i, j) != 0 ? scaled(c, b, h, i, j) : none;
    });
  }
}

TEST(Reference, FloatingMasksAddAndBroadcastAndMinusInfinityHides) {
  SeededRandom random(12);
  Case c = weights_case(random);
  for (const Shape& shape : mask_shapes()) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      c.mask =
          tabulate(shape, [&](const Shape&) { return random.chance(0.3) ? none : random.normal(); }, dtype);
      expect_weights(c, [&](auto b, auto h, auto i, auto j) {
        return scaled(c, b, h, i, j) + mask_at(c.mask, b, h, i, j);
      });
    }
  }
}

TEST(Reference, AllPartsOfTheScoreComeInTheContractsOrder) {
  SeededRandom random(13);
  Case c = weights_case(random, {.sq = 4});
  c.mask = random_buffer(random, {2, 1, 4, 5});
  c.alibi_slopes = random_buffer(random, {4});
  c.sinks = tabulate({4}, [](const Shape&) { return 0.25; });
  c.options.scale = 1.5f;
  c.options.softcap = 1.25f;
  c.options.causal = true;
  c.options.alignment = Alignment::bottom_right;
  c.options.window.left = 2;
  expect_weights(
      c,
      [&](auto b, auto h, auto i, auto j) {
        if (j > i + 1 || j < i + 1 - 2) return none;
        const double capped = 1.25 * std::tanh(1.5 * product(c, b, h, i, j) / 1.25);
        return capped - c.alibi_slopes.at(h) * std::abs(static_cast<double>(i + 1 - j)) +
               c.mask.at(b, 0, i, j);
      },
      0.25);
}

TEST(Reference, DropoutZeroesWhatItsMaskSaysAndScalesTheRest) {
  SeededRandom random(14);
  Case c = weights_case(random, {.sq = 16, .sk = 33});
  const CaseResults whole = forward(c);
  c.options.dropout = {.probability = 0.3f, .seed = 77, .offset = 5};
  const CaseResults dropped = forward(c);
  expect_close(dropped.lse, whole.lse, "lse");
  const DropoutMask mask(c.options.dropout);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::uint32_t i = 0; i < 16; ++i) {
        for (std::uint32_t j = 0; j < 33; ++j) {
          const bool keeps = mask.keeps(static_cast<std::uint32_t>(b * 4 + h), i, j);
          const double factor = static_cast<double>(mask.keep_scale);
          if (keeps) {
            ASSERT_TRUE(close(dropped.o.at(b, h, i, j), whole.o.at(b, h, i, j) * factor));
          } else {
            ASSERT_EQ(dropped.o.at(b, h, i, j), 0);
          }
        }
      }
    }
  }
}

TEST(Reference, DropoutLeavesTheExpectationAsItIs) {
  SeededRandom random(15);
  Case c = random_case(random, {.b = 1, .hq = 1, .hkv = 1, .sq = 1, .sk = 4, .dv = 1});
  const double expected = forward(c).o.at(0, 0, 0, 0);
  double sum = 0, squares = 0;
  constexpr int draws = 4000;
  for (int n = 0; n < draws; ++n) {
    c.options.dropout = {.probability = 0.4f, .seed = 3, .offset = static_cast<std::uint64_t>(n)};
    const double o = forward(c).o.at(0, 0, 0, 0);
    sum += o;
    squares += o * o;
  }
  const double mean = sum / draws;
  const double error = std::sqrt((squares / draws - mean * mean) / draws);
  EXPECT_NEAR(mean, expected, 4 * error);
  EXPECT_GT(error, 0);
}

TEST(Reference, LargeScoresNeitherOverflowNorVanish) {
  Case c;
  c.q = tabulate({1, 1, 1, 1}, [](const Shape&) { return 1.0; });
  c.k = tabulate({1, 1, 3, 1}, [](const Shape& x) { return x[2] == 0 ? -5000.0 : 5000.0; });
  c.v = unit_values(1, 1, 3);
  const CaseResults results = forward(c);
  EXPECT_TRUE(close(results.lse.at(0, 0, 0), 5000 + std::log(2.0)));
  EXPECT_EQ(results.o.at(0, 0, 0, 0), 0);
  EXPECT_TRUE(close(results.o.at(0, 0, 0, 1), 0.5, 1e-12));  // exp of a difference of numbers near 5000
}

TEST(Reference, HeadDimsReach4096) {
  Case c;
  c.q = tabulate({1, 1, 1, 4096}, [](const Shape& x) { return x[3] == 4095 ? 64.0 : 0.0; });
  c.k = tabulate({1, 1, 2, 4096},
                 [](const Shape& x) { return x[2] == 1 && x[3] == 4095 ? std::log(3.0) : 0.0; });
  c.v = tabulate({1, 1, 2, 4096}, [](const Shape& x) { return static_cast<double>(x[2] * x[3]); });
  const CaseResults results = forward(c);
  EXPECT_TRUE(close(results.lse.at(0, 0, 0), std::log(4.0)));
  EXPECT_TRUE(close(results.o.at(0, 0, 0, 4095), 0.75 * 4095));
}

}  // namespace
}  // namespace tilewise::test::reference_test
