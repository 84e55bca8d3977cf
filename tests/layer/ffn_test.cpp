#include "ffn/validate.h"
#include "layer/ffn_case.h"

namespace tilewise::test::ffn_test {
namespace {

using namespace ffn_case;

constexpr Activation activations[] = {Activation::relu, Activation::gelu, Activation::gelu_tanh,
                                      Activation::silu};

TEST(Ffn, both_passes_are_near_the_truth_for_every_activation_and_type) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation : activations) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        const Sizes n{random.between(1, 60), random.between(1, 70), random.between(1, 150),
                      random.between(1, 70)};
        Problem p = random_problem(random, n, dtype, activation, gated);
        const Context context = random_context(random);
        check_forward(p, context);
        check_backward(p, context);
      }
    }
  }
}

TEST(Ffn, a_bound_on_memory_changes_nothing_but_the_workspace) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SeededRandom random(77);
    Problem p = random_problem(random, {90, 20, 300, 20}, dtype, Activation::silu, true);
    const Context context{.parallel_for = serial_parallel_for()};
    const std::size_t whole = ffn_forward_workspace(p.inputs(), p.options, p.outputs(), context);
    forward(p, context);
    const std::vector<std::byte> out = p.out.bytes();
    p.options.max_intermediate_bytes = 40 * 300 * size_of(dtype);
    EXPECT_LT(ffn_forward_workspace(p.inputs(), p.options, p.outputs(), context), whole);
    p.out.poison();
    forward(p, context);
    if (dtype == DType::f32) {
      const Problem e = exact_problem(p);
      forward(e);
      expect_near(p.out, e.out.values(), plain_forward(p), "out", 2);
    } else {
      EXPECT_EQ(out, p.out.bytes());
    }
    p.options.max_intermediate_bytes = 3 * 90 * 130 * size_of(dtype);  // chunks of 128 hidden features
    check_backward(p, context);
    p.options.max_intermediate_bytes = 1;
    check_forward(p, context);
    check_backward(p, context);
  }
}

TEST(Ffn, with_products_kept_both_passes_are_near_the_truth) {
  std::uint64_t seed = 300;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Activation activation : activations) {
      for (const bool gated : {false, true}) {
        SeededRandom random(++seed);
        const Sizes n{random.between(1, 60), random.between(1, 70), random.between(1, 150),
                      random.between(1, 70)};
        Problem p = random_problem(random, n, dtype, activation, gated);
        if (random.chance(0.3)) p.options.max_intermediate_bytes = 5000;
        check_kept(p, random, random_context(random));
      }
    }
  }
}

TEST(Ffn, the_reference_keeps_products_and_reads_them) {
  SeededRandom random(340);
  Problem p = random_problem(random, {5, 7, 9, 6}, DType::f64, Activation::silu, true);
  p.options.kernel = "reference";
  check_kept(p, random, {});
}

TEST(Ffn, no_tokens_and_no_hidden_features_are_valid) {
  for (const Sizes n : {Sizes{0, 5, 7, 5}, {3, 5, 0, 4}, {40, 5, 0, 4}, {3, 0, 4, 5}}) {
    for (const std::string_view kernel : {"chunked", "reference"}) {
      SeededRandom random(5);
      Problem p = random_problem(random, n, DType::f32, Activation::gelu, true);
      p.options.kernel = kernel;
      check_forward(p, {});
      check_backward(p, {});
    }
  }
}

TEST(Ffn, only_the_gradients_given_are_computed) {
  for (std::size_t left_out = 0; left_out < 7; ++left_out) {
    SeededRandom random(20 + left_out);
    Problem p = random_problem(random, {35, 12, 20, 12}, DType::bf16, Activation::silu, true);
    *p.pairs()[left_out].first = {};
    check_backward(p, {});
  }
}

TEST(Ffn, the_reference_gradients_are_those_of_differences) {
  for (const Activation activation : activations) {
    const bool gated = activation == Activation::silu || activation == Activation::gelu_tanh;
    SeededRandom random(31);
    Problem p = exact_problem(random_problem(random, {3, 4, 4, 3}, DType::f64, activation, gated));
    backward(p);
    const auto loss = [&] {
      forward(p);
      double sum = 0;
      for (std::int64_t m = 0; m < 3; ++m) {
        for (std::int64_t o = 0; o < 3; ++o) sum += p.out.at(m, o) * p.d_out.at(m, o);
      }
      return sum;
    };
    for (const auto& [gradient, of] : p.pairs()) {
      if (!gradient->given()) continue;
      auto& input = const_cast<Buffer&>(*of);
      const std::vector<double> values = input.values(), slopes = gradient->values();
      for (std::size_t n = 0; n < values.size(); ++n) {
        constexpr double step = 1e-5;
        std::vector<double> moved = values;
        moved[n] = values[n] + step;
        input.set_values(moved);
        const double above = loss();
        moved[n] = values[n] - step;
        input.set_values(moved);
        const double below = loss();
        input.set_values(values);
        EXPECT_NEAR(slopes[n], (above - below) / (2 * step), 1e-8);
      }
    }
  }
}

TEST(Ffn, residual_may_be_out_itself) {
  SeededRandom random(12);
  Problem p = random_problem(random, {45, 20, 30, 20}, DType::f32, Activation::gelu, false);
  p.residual = random_buffer(random, DType::f32, {45, 20});
  const Problem e = exact_problem(p);
  forward(e);
  const Plain plain = plain_forward(p);
  p.out = p.residual;  // shares its memory
  forward(p);
  expect_near(p.out, e.out.values(), plain, "out", 2);
}

TEST(Ffn, bad_input_is_named_and_nothing_is_written) {
  struct Mistake {
    std::string_view text;
    void (*make)(Problem& p);
  };
  const Mistake mistakes[] = {
      {"x: expected rank 2 [M, E], got none", [](Problem& p) { p.x = {}; }},
      {"up: expected rank 2 [F, E] with E 4, got f32[6, 5]",
       [](Problem& p) { p.up = Buffer(DType::f32, {6, 5}); }},
      {"down: expected rank 2 [O, F] with F 6, got f32[4, 5]",
       [](Problem& p) { p.down = Buffer(DType::f32, {4, 5}); }},
      {"down: expected f32, got bf16", [](Problem& p) { p.down = Buffer(DType::bf16, {4, 6}); }},
      {"gate: expected the shape of up, [6, 4], got f32[5, 4]",
       [](Problem& p) { p.gate = Buffer(DType::f32, {5, 4}); }},
      {"gate_bias: expected a gate to add it to, got no gate",
       [](Problem& p) { p.gate_bias = Buffer(DType::f32, {6}); }},
      {"down_bias: expected a value for each output = [4], got f32[6]",
       [](Problem& p) { p.down_bias = Buffer(DType::f32, {6}); }},
      {"residual: expected [M, O] = [3, 4], got f32[4, 3]",
       [](Problem& p) { p.residual = Buffer(DType::f32, {4, 3}); }},
      {"up_product: expected [M, F] = [3, 6], got f32[3, 5]",
       [](Problem& p) { p.up_product = Buffer(DType::f32, {3, 5}); }},
      {"gate_product: expected none without a gate, got f32[3, 6]",
       [](Problem& p) { p.gate_product = Buffer(DType::f32, {3, 6}); }},
      {"gate_product: expected [M, F] = [3, 6], got none",
       [](Problem& p) {
         p.gate = Buffer(DType::f32, {6, 4});
         p.options.activation = Activation::silu;
         p.up_product = Buffer(DType::f32, {3, 6});
       }},
      {"out: expected f32, got f16", [](Problem& p) { p.out = Buffer(DType::f16, {3, 4}); }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(6);
    Problem p;
    p.x = random_buffer(random, DType::f32, {3, 4});
    p.up = random_buffer(random, DType::f32, {6, 4});
    p.down = random_buffer(random, DType::f32, {4, 6});
    p.out = Buffer(DType::f32, {3, 4});
    mistake.make(p);
    const std::vector<std::byte> before = p.out.bytes();
    EXPECT_EQ(thrown<InvalidArgument>([&] { forward(p); }), mistake.text);
    EXPECT_EQ(before, p.out.bytes());
  }
  SeededRandom random(6);
  Problem p = random_problem(random, {3, 4, 6, 4}, DType::f32, Activation::gelu, false);
  p.d_gate = Buffer(DType::f32, {6, 4});
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }),
            "d_gate: expected gate to differentiate, got none");
}

TEST(Ffn, tf32_is_allowed_where_it_is_asked_for_alone) {
  SeededRandom random(8);
  Problem p = random_problem(random, {3, 4, 6, 4}, DType::f32, Activation::gelu, false);
  p.make_gradients();
  for (const Precision precision : {Precision::standard, Precision::strict, Precision::allow_tf32}) {
    p.options.precision = precision;
    const bool expected = precision == Precision::allow_tf32;
    EXPECT_EQ(checked_ffn_forward(p.inputs(), p.options, p.outputs(), {}).problem.allow_tf32, expected);
    EXPECT_EQ(checked_ffn_backward(p.inputs(), p.options, p.gradients(), {}).problem.allow_tf32, expected);
  }
}

TEST(Ffn, gradients_have_the_type_of_what_they_are_of_and_contiguous_rows) {
  SeededRandom random(7);
  Problem p = random_problem(random, {3, 4, 6, 4}, DType::f32, Activation::gelu, false);
  p.make_gradients();
  p.d_up = Buffer(DType::bf16, {6, 4});
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }), "d_up: expected f32, got bf16");

  p.make_gradients();
  std::vector<float> apart(6 * 4 * 2);
  FfnGradients gradients = p.gradients();
  gradients.d_up =
      Tensor(apart.data(), DType::f32, std::array<std::int64_t, 2>{6, 4}, std::array<std::int64_t, 2>{8, 2});
  const Context context{.parallel_for = serial_parallel_for()};
  EXPECT_EQ(
      thrown<InvalidArgument>([&] { ffn_backward_workspace(p.inputs(), p.options, gradients, context); }),
      "d_up: expected a contiguous last dimension, got stride 2");
}

}  // namespace
}  // namespace tilewise::test::ffn_test
