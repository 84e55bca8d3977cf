#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "cpu/reference_case.h"

// Every gradient of the reference against finite differences of its forward pass, all in f64.
namespace tilewise::test::reference_gradient_test {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();
constexpr double step = 2e-3;
// Of the largest gradient. The five-point difference is off by step^4/30 of the fifth derivative, about
// 1e-12, and by as much again from rounding; a wrong term shows at 1e-2.
constexpr double tolerance = 1e-9;

struct Objective {
  Buffer d_o;
  Buffer d_lse;  // may be absent

  // Σ o·d_o + Σ lse·d_lse, whose gradients backward gives. A row that sees nothing has no lse to speak of.
  double of(const Case& c) const {
    const CaseResults results = forward(c);
    double sum = 0;
    const std::vector<double> o = results.o.values(), weights = d_o.values();
    for (std::size_t n = 0; n < o.size(); ++n) sum += o[n] * weights[n];
    if (!d_lse.given()) return sum;
    const std::vector<double> lse = results.lse.values(), lse_weights = d_lse.values();
    for (std::size_t n = 0; n < lse.size(); ++n) sum += lse[n] == none ? 0 : lse[n] * lse_weights[n];
    return sum;
  }
};

// The gradient with respect to `input`, a tensor of the case.
std::vector<double> differences(const Case& c, Buffer& input, const Objective& objective) {
  std::vector<double> values = input.values(), gradient;
  for (double& value : values) {
    const double middle = value;
    const auto at = [&](double offset) {
      value = middle + offset * step;
      input.set_values(values);
      return objective.of(c);
    };
    gradient.push_back((8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step));
    value = middle;
  }
  input.set_values(values);
  return gradient;
}

void expect_gradient(const Case& c, Buffer& input, const Buffer& gradient, const Objective& objective,
                     const char* name) {
  const std::vector<double> expected = differences(c, input, objective), given = gradient.values();
  ASSERT_EQ(given.size(), expected.size()) << name;
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  EXPECT_GT(largest, 1e-3) << name << " tests nothing";
  for (std::size_t n = 0; n < given.size(); ++n) {
    ASSERT_NEAR(given[n], expected[n], tolerance * largest) << name << " element " << n;
  }
}

void expect_gradients(Case& c, Random& random) {
  Objective objective;
  Shape o_shape = c.q.shape();
  o_shape.back() = c.v.shape().back();
  objective.d_o = random_buffer(random, o_shape);
  for (const bool with_lse : {false, true}) {
    SCOPED_TRACE(with_lse ? "with d_lse" : "without d_lse");
    if (with_lse) objective.d_lse = random_buffer(random, forward(c).lse.shape());
    const Gradients gradients = backward(c, objective.d_o, objective.d_lse);
    expect_gradient(c, c.q, gradients.dq, objective, "dq");
    expect_gradient(c, c.k, gradients.dk, objective, "dk");
    expect_gradient(c, c.v, gradients.dv, objective, "dv");
    if (gradients.dmask.given()) expect_gradient(c, c.mask, gradients.dmask, objective, "dmask");
    if (gradients.dsinks.given()) expect_gradient(c, c.sinks, gradients.dsinks, objective, "dsinks");
    if (gradients.dlogit_scale.given())
      expect_gradient(c, c.logit_scale, gradients.dlogit_scale, objective, "dlogit_scale");
  }
}

struct Feature {
  const char* name;
  Case (*make)(Random&);
};

std::ostream& operator<<(std::ostream& out, const Feature& feature) { return out << feature.name; }

Case additive_mask(Random& random, const Shape& shape, const Sizes& n = {}) {
  Case c = random_case(random, n);
  c.mask = random_buffer(random, shape);
  return c;
}

// Three sequences, one without keys and one without queries between them, and rows that belong to none.
Case packed_case(Random& random) {
  Case c;
  c.q = random_buffer(random, {8, 4, 3});
  c.k = random_buffer(random, {9, 2, 3});
  c.v = random_buffer(random, {9, 2, 2});
  c.cumulative_q = indices_buffer({6}, {0, 2, 3, 3, 3, 7});
  c.cumulative_k = indices_buffer({6}, {0, 4, 4, 6, 6, 8});
  c.max_length_q = 4;
  c.max_length_k = 5;
  return c;
}

Case block_case(Random& random, bool per_head, bool with_tiles) {
  Case c = random_case(random, {.sq = 5, .sk = 7});
  c.block_q = 2;
  c.block_k = 3;
  add_random_blocks(c, random, per_head, with_tiles);
  return c;
}

const Feature features[] = {
    {"Plain", [](Random& random) { return random_case(random); }},
    {"OneKeyAndASink",
     [](Random& random) {
       Case c = random_case(random, {.sk = 1});
       c.sinks = random_buffer(random, {4});
       return c;
     }},
    {"ManyHeads", [](Random& random) { return random_case(random, {.b = 1, .hq = 6, .hkv = 6}); }},
    {"OneKeyHead", [](Random& random) { return random_case(random, {.b = 1, .hq = 6, .hkv = 1}); }},
    {"WiderValues", [](Random& random) { return random_case(random, {.d = 1, .dv = 6}); }},
    {"Scale",
     [](Random& random) {
       Case c = random_case(random);
       c.options.scale = -0.8f;
       return c;
     }},
    {"CausalTopLeft",
     [](Random& random) {
       Case c = random_case(random, {.sq = 4, .sk = 6});
       c.options.causal = true;
       return c;
     }},
    {"CausalBottomRight",
     [](Random& random) {
       Case c = random_case(random, {.sq = 4, .sk = 6});
       c.options.causal = true;
       c.options.alignment = Alignment::bottom_right;
       return c;
     }},
    {"CausalBottomRightWithEmptyRows",
     [](Random& random) {
       Case c = random_case(random, {.sq = 6, .sk = 3});
       c.options.causal = true;
       c.options.alignment = Alignment::bottom_right;
       return c;
     }},
    {"Window",
     [](Random& random) {
       Case c = random_case(random, {.sq = 5, .sk = 7});
       c.options.window = {.left = 1, .right = 2};
       return c;
     }},
    {"Softcap",
     [](Random& random) {
       Case c = random_case(random);
       c.options.softcap = 1.5f;
       return c;
     }},
    {"Alibi",
     [](Random& random) {
       Case c = random_case(random);
       c.alibi_slopes = random_buffer(random, {4}, 0.5);
       return c;
     }},
    {"AlibiPerEntry",
     [](Random& random) {
       Case c = random_case(random);
       c.alibi_slopes = random_buffer(random, {2, 4}, 0.5);
       return c;
     }},
    {"BooleanMask",
     [](Random& random) {
       Case c = random_case(random);
       c.mask = Buffer(DType::boolean, {2, 1, 3, 5});
       c.mask.fill_random(random);
       return c;
     }},
    {"MaskWithHiddenKeys",
     [](Random& random) {
       Case c = random_case(random);
       c.mask =
           tabulate({4, 3, 5}, [&](const Shape&) { return random.chance(0.4) ? none : random.normal(); });
       return c;
     }},
    {"Sinks",
     [](Random& random) {
       Case c = random_case(random);
       c.sinks = random_buffer(random, {4});
       return c;
     }},
    {"SinksWithEmptyRows",
     [](Random& random) {
       Case c = random_case(random, {.sq = 6, .sk = 3});
       c.sinks = random_buffer(random, {4});
       c.options.causal = true;
       c.options.alignment = Alignment::bottom_right;
       return c;
     }},
    {"LogitScale",
     [](Random& random) {
       Case c = random_case(random);
       c.logit_scale = random_buffer(random, {4});
       return c;
     }},
    {"LogitScaleOfZero",
     [](Random& random) {
       Case c = random_case(random);
       c.logit_scale = tabulate({4}, [](const Shape& x) { return x[0] == 2 ? 0.0 : 1.5; });
       c.options.softcap = 2;
       return c;
     }},
    {"Dropout",
     [](Random& random) {
       Case c = random_case(random);
       c.options.dropout = {.probability = 0.4f, .seed = 12, .offset = 34};
       return c;
     }},
    {"KeyLengths",
     [](Random& random) {
       Case c = random_case(random, {.b = 3});
       c.key_lengths = indices_buffer({3}, {5, 2, 0});
       return c;
     }},
    {"Blocks", [](Random& random) { return block_case(random, false, false); }},
    {"BlocksWithTiles", [](Random& random) { return block_case(random, true, true); }},
    {"Packed", packed_case},
    {"PackedWithEverything",
     [](Random& random) {
       Case c = packed_case(random);
       c.alibi_slopes = random_buffer(random, {5, 4}, 0.5);
       c.sinks = random_buffer(random, {4});
       c.logit_scale = random_buffer(random, {4});
       c.options.causal = true;
       c.options.alignment = Alignment::bottom_right;
       c.options.window.left = 2;
       c.options.softcap = 2;
       c.options.dropout = {.probability = 0.2f, .seed = 5, .offset = 6};
       return c;
     }},
    {"EverythingTogether",
     [](Random& random) {
       Case c = block_case(random, true, true);
       c.mask = random_buffer(random, {1, 4, 5, 7});
       c.alibi_slopes = random_buffer(random, {2, 4}, 0.5);
       c.sinks = random_buffer(random, {4});
       c.logit_scale = random_buffer(random, {4});
       c.key_lengths = indices_buffer({2}, {7, 5});
       c.options.scale = 0.7f;
       c.options.causal = true;
       c.options.alignment = Alignment::bottom_right;
       c.options.window.left = 4;
       c.options.softcap = 2;
       c.options.dropout = {.probability = 0.2f, .seed = 7, .offset = 8};
       return c;
     }},
};

class ReferenceGradient : public testing::TestWithParam<Feature> {};

TEST_P(ReferenceGradient, EqualsFiniteDifferences) {
  for (const std::uint64_t seed : {301u, 302u}) {
    SeededRandom random(seed);
    Case c = GetParam().make(random);
    expect_gradients(c, random);
  }
}

INSTANTIATE_TEST_SUITE_P(Features, ReferenceGradient, testing::ValuesIn(features),
                         [](const auto& tested) { return std::string(tested.param.name); });

// The sixteen ways to broadcast four dimensions, and fewer than four.
TEST(ReferenceMaskGradient, EqualsFiniteDifferencesInEveryBroadcastForm) {
  std::vector<Shape> shapes = {{5}, {1}, {3, 5}, {3, 1}, {4, 3, 5}, {4, 1, 1}};
  for (int bits = 0; bits < 16; ++bits) {
    shapes.push_back(
        {(bits & 1) != 0 ? 2 : 1, (bits & 2) != 0 ? 4 : 1, (bits & 4) != 0 ? 3 : 1, (bits & 8) != 0 ? 5 : 1});
  }
  SeededRandom random(303);
  for (const Shape& shape : shapes) {
    Case c = additive_mask(random, shape);
    SCOPED_TRACE(shape_string(c.mask.view()));
    c.sinks = random_buffer(random, {4});  // without it a constant on a whole row has no gradient in o
    const Objective objective{random_buffer(random, {2, 4, 3, 2}), random_buffer(random, {2, 4, 3})};
    const Gradients gradients = backward(c, objective.d_o, objective.d_lse);
    expect_gradient(c, c.mask, gradients.dmask, objective, "dmask");
  }
}

TEST(ReferenceMaskGradient, IsSummedInF64AndRoundedOnce) {
  SeededRandom random(304);
  Case c = additive_mask(random, {3, 5});
  const Buffer d_o = random_buffer(random, {2, 4, 3, 2});
  const Gradients wide = backward(c, d_o, {});
  const std::vector<double> values = c.mask.values();
  c.mask = Buffer(DType::f32, {3, 5});  // an f32 mask beside f64 tensors; its gradient comes in f32
  c.mask.set_values(values);
  Case same = c;
  same.mask = Buffer(DType::f64, {3, 5});
  same.mask.set_values(c.mask.values());
  const std::vector<double> narrow = backward(c, d_o, {}).dmask.values(),
                            exact = backward(same, d_o, {}).dmask.values();
  for (std::size_t n = 0; n < narrow.size(); ++n) {
    EXPECT_EQ(narrow[n], static_cast<double>(static_cast<float>(exact[n])));
  }
  EXPECT_EQ(wide.dmask.dtype(), DType::f64);
}

TEST(ReferenceGradients, AreTheSameWhicheverAreAsked) {
  SeededRandom random(305);
  Case c = additive_mask(random, {4, 1, 5});
  c.sinks = random_buffer(random, {4});
  c.logit_scale = random_buffer(random, {4});
  const Buffer d_o = random_buffer(random, {2, 4, 3, 2});
  const CaseResults results = forward(c);
  const Gradients all = backward(c, d_o, {});
  using Member = Tensor AttentionGradients::*;
  const std::pair<Member, const Buffer*> members[] = {{&AttentionGradients::dq, &all.dq},
                                                      {&AttentionGradients::dk, &all.dk},
                                                      {&AttentionGradients::dv, &all.dv},
                                                      {&AttentionGradients::dmask, &all.dmask},
                                                      {&AttentionGradients::dsinks, &all.dsinks}};
  for (const auto& [member, expected] : members) {
    const Buffer alone(DType::f64, expected->shape());
    AttentionGradients gradients;
    gradients.o = results.o.view();
    gradients.lse = results.lse.view();
    gradients.d_o = d_o.view();
    gradients.*member = alone.view();
    run_backward(c.inputs(), c.options, gradients, serial_context());
    EXPECT_TRUE(alone.bytes() == expected->bytes());
    EXPECT_TRUE(alone.guards_intact());
  }
}

}  // namespace
}  // namespace tilewise::test::reference_gradient_test
