#include "layer/norm_case.h"

namespace tilewise::test::norm_test {
namespace {

using namespace norm_case;

constexpr Norm norms[] = {Norm::rms, Norm::layer};

TEST(Norm, both_passes_are_near_the_truth_for_every_type_and_level) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Norm norm : norms) {
      for (int repeat = 0; repeat < 12; ++repeat) {
        SeededRandom random(++seed);
        const std::int64_t rows = random.chance(0.2) ? 1 : random.between(2, 90);
        Problem p = random_problem(random, rows, random.between(1, 200), dtype, norm);
        check(p, random_context(random));
      }
    }
  }
}

TEST(Norm, long_rows_are_near_the_truth) {
  for (const Norm norm : norms) {
    SeededRandom random(40);
    Problem p = random_problem(random, 40, 4099, DType::f32, norm);
    check(p, random_context(random));
  }
}

TEST(Norm, no_rows_are_valid_and_their_weight_gradients_zero) {
  for (const Norm norm : norms) {
    for (const std::string_view kernel : {"simd", "reference"}) {
      SeededRandom random(3);
      Problem p = random_problem(random, 0, 5, DType::f32, norm);
      p.weight = random_buffer(random, DType::f32, {5});
      p.d_weight = Buffer(DType::f32, {5});
      p.options.kernel = kernel;
      forward(p);
      backward(p);
      EXPECT_EQ(p.d_weight.values(), std::vector<double>(5, 0.0));
    }
  }
}

TEST(Norm, a_row_of_equal_numbers_has_no_variance) {
  Problem p;
  p.options.norm = Norm::layer;
  p.x = Buffer(DType::f32, {1, 37});
  p.x.fill(1000.1);
  p.y = Buffer(DType::f32, {1, 37});
  forward(p);
  for (const double y : p.y.values())
    EXPECT_NEAR(y, 0, 1e-1);  // what is left of 1000 in f32, times 1/√epsilon
}

TEST(Norm, outputs_may_stand_where_inputs_do) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::string_view kernel : {"simd", "reference"}) {
      SeededRandom random(8);
      Problem p = random_problem(random, 6, 50, dtype, Norm::layer);
      p.residual = random_buffer(random, dtype, {6, 50});
      p.sum = Buffer(dtype, {6, 50});
      p.d_sum = random_buffer(random, dtype, {6, 50});
      p.options.kernel = kernel;
      forward(p);
      backward(p);
      const std::vector<std::byte> y = p.y.bytes(), sum = p.sum.bytes(), dx = p.dx.bytes();
      Problem in_place = p;
      in_place.dx = p.d_sum;
      backward(in_place);
      EXPECT_EQ(in_place.dx.bytes(), dx);
      in_place.d_sum = p.d_sum = {};
      in_place.dx = p.dy;
      backward(p);
      backward(in_place);
      EXPECT_EQ(in_place.dx.bytes(), p.dx.bytes());
      in_place.sum = p.residual;
      forward(in_place);
      EXPECT_EQ(in_place.y.bytes(), y);
      EXPECT_EQ(in_place.sum.bytes(), sum);
      Problem plain = p;
      plain.residual = plain.sum = {};
      forward(plain);
      const std::vector<std::byte> alone = plain.y.bytes();
      plain.y = plain.x;
      forward(plain);
      EXPECT_EQ(plain.y.bytes(), alone);
    }
  }
}

TEST(Norm, gradients_of_weights_do_not_depend_on_threads) {
  SeededRandom random(9);
  Problem p = random_problem(random, 200, 60, DType::f32, Norm::layer);
  p.weight = random_buffer(random, DType::f32, {60});
  p.d_weight = Buffer(DType::f32, {60});
  p.d_bias = p.bias = {};
  forward(p);
  backward(p);
  const std::vector<std::byte> one = p.d_weight.bytes();
  backward(p, {.parallel_for = openmp_parallel_for(3)});
  EXPECT_EQ(one, p.d_weight.bytes());
}

TEST(Norm, the_reference_gradients_are_those_of_differences) {
  for (const Norm norm : norms) {
    SeededRandom random(21);
    Problem p = random_problem(random, 3, 5, DType::f64, norm);
    p.options.kernel = "reference";
    p.residual = p.sum = p.d_sum = {};
    p.weight = random_buffer(random, DType::f64, {5});
    p.d_weight = Buffer(DType::f64, {5});
    forward(p);
    backward(p);
    const auto loss = [&] {
      forward(p);
      double sum = 0;
      for (std::int64_t m = 0; m < 3; ++m) {
        for (std::int64_t d = 0; d < 5; ++d) sum += p.y.at(m, d) * p.dy.at(m, d);
      }
      return sum;
    };
    const std::array<std::pair<Buffer*, Buffer*>, 3> pairs = {
        {{&p.dx, &p.x}, {&p.d_weight, &p.weight}, {&p.d_bias, &p.bias}}};
    for (const auto& [gradient, input] : pairs) {
      if (!gradient->given()) continue;
      const std::vector<double> values = input->values(), slopes = gradient->values();
      for (std::size_t n = 0; n < values.size(); ++n) {
        constexpr double step = 1e-5;
        std::vector<double> moved = values;
        moved[n] = values[n] + step;
        input->set_values(moved);
        const double above = loss();
        moved[n] = values[n] - step;
        input->set_values(moved);
        const double below = loss();
        input->set_values(values);
        EXPECT_NEAR(slopes[n], (above - below) / (2 * step), 1e-7 * (1 + std::abs(slopes[n])));
      }
    }
  }
}

TEST(Norm, bad_input_is_named_and_nothing_is_written) {
  struct Mistake {
    std::string_view text;
    void (*make)(Problem& p);
  };
  const Mistake mistakes[] = {
      {"x: expected rank 2 [M, D], got none", [](Problem& p) { p.x = {}; }},
      {"x: expected rows of at least one element, got f32[3, 0]",
       [](Problem& p) { p.x = Buffer(DType::f32, {3, 0}); }},
      {"epsilon: expected a finite number, 0 or above, got -1", [](Problem& p) { p.options.epsilon = -1; }},
      {"residual: expected the shape of x = [3, 4], got f32[4, 3]",
       [](Problem& p) { p.residual = Buffer(DType::f32, {4, 3}); }},
      {"weight: expected [D] = [4], got f32[3]", [](Problem& p) { p.weight = Buffer(DType::f32, {3}); }},
      {"weight: expected f32 or the type of x, f32, got bf16",
       [](Problem& p) { p.weight = Buffer(DType::bf16, {4}); }},
      {"bias: expected none with an rms norm, got f32[4]",
       [](Problem& p) { p.bias = Buffer(DType::f32, {4}); }},
      {"sum: expected a residual to add, got no residual",
       [](Problem& p) { p.sum = Buffer(DType::f32, {3, 4}); }},
      {"rstd: expected f32, got f16", [](Problem& p) { p.rstd = Buffer(DType::f16, {3}); }},
      {"mean: expected none with an rms norm, got f32[3]",
       [](Problem& p) { p.mean = Buffer(DType::f32, {3}); }},
      {"y: expected memory that does not overlap residual, got an overlap",
       [](Problem& p) { p.residual = p.y; }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(6);
    Problem p;
    p.x = random_buffer(random, DType::f32, {3, 4});
    p.y = Buffer(DType::f32, {3, 4});
    mistake.make(p);
    const std::vector<std::byte> before = p.y.bytes();
    EXPECT_EQ(thrown<InvalidArgument>([&] { forward(p); }), mistake.text);
    EXPECT_EQ(before, p.y.bytes());
  }
  SeededRandom random(6);
  Problem p = random_problem(random, 3, 4, DType::f32, Norm::rms);
  p.rstd = {};
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }), "rstd: expected the rstd of forward, got none");
  p = random_problem(random, 3, 4, DType::f32, Norm::rms);
  p.y = {};
  EXPECT_EQ(thrown<InvalidArgument>([&] { forward(p); }), "y: expected the shape of x, got none");
  p.dy = {};
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }), "dy: expected the shape of x, got none");
  p = random_problem(random, 3, 4, DType::f32, Norm::layer);
  p.weight = p.bias = p.d_weight = p.d_bias = {};
  p.d_bias = Buffer(DType::f32, {4});
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }),
            "d_bias: expected a bias to differentiate, got no bias");
  std::swap(p.d_weight, p.d_bias);
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }),
            "d_weight: expected a weight to differentiate, got no weight");
}

TEST(Norm, a_sum_may_be_x_or_residual_but_no_part_of_them) {
  std::vector<float> memory(16, 1.0f), other(12, 1.0f), y(12);
  const auto run = [&](float* x, float* residual, float* sum) {
    const NormInputs inputs{.x = Tensor::of(x, {3, 4}), .residual = Tensor::of(residual, {3, 4})};
    const NormOutputs outputs{.y = Tensor::of(y.data(), {3, 4}), .sum = Tensor::of(sum, {3, 4})};
    const Context context{.parallel_for = serial_parallel_for()};
    norm_forward_workspace(inputs, {}, outputs, context);  // which checks, and writes nothing
  };
  run(memory.data(), other.data(), memory.data());
  run(other.data(), memory.data(), memory.data());
  EXPECT_EQ(thrown<InvalidArgument>([&] { run(memory.data(), other.data(), memory.data() + 1); }),
            "sum: expected memory that does not overlap x, got an overlap");
  EXPECT_EQ(thrown<InvalidArgument>([&] { run(other.data(), memory.data(), memory.data() + 4); }),
            "sum: expected memory that does not overlap residual, got an overlap");
}

}  // namespace
}  // namespace tilewise::test::norm_test
