#include <array>

#include "layer/plain.h"

namespace tilewise::test {
namespace {

struct Problem {
  Buffer x, residual, weight, bias, y, sum, rstd, mean;
  Buffer dy, d_sum, dx, d_weight, d_bias;
  NormOptions options;

  NormInputs inputs() const { return {x.view(), residual.view(), weight.view(), bias.view()}; }
  NormOutputs outputs() const { return {y.view(), sum.view(), rstd.view(), mean.view()}; }
  NormInputs backward_inputs() const {
    return {residual.given() ? sum.view() : x.view(), {}, weight.view(), bias.view()};
  }
  NormGradients gradients() const {
    return {dy.view(), d_sum.view(), rstd.view(), mean.view(), dx.view(), d_weight.view(), d_bias.view()};
  }
};

Problem random_problem(Random& random, std::int64_t rows, std::int64_t dim, DType dtype, Norm norm) {
  Problem p;
  const Shape shape = {rows, dim};
  p.options.norm = norm;
  p.options.epsilon = 1e-5f;
  p.x = random_buffer(random, dtype, shape, random.log_uniform(0.1, 10), random_placement(random));
  if (random.chance(0.5)) {
    p.residual = random_buffer(random, dtype, shape, 1, random_placement(random));
    p.sum = Buffer(dtype, shape, random_placement(random));
  }
  const DType weights = random.chance(0.3) ? DType::f32 : dtype;
  if (random.chance(0.7)) p.weight = random_buffer(random, weights, {dim});
  if (norm == Norm::layer && random.chance(0.7)) p.bias = random_buffer(random, weights, {dim});
  p.y = Buffer(dtype, shape, random_placement(random));
  p.y.poison();
  const DType statistics = dtype == DType::f64 ? DType::f64 : DType::f32;
  p.rstd = Buffer(statistics, {rows});
  if (norm == Norm::layer) p.mean = Buffer(statistics, {rows});
  p.dy = random_buffer(random, dtype, shape, 1, random_placement(random));
  if (random.chance(0.5)) p.d_sum = random_buffer(random, dtype, shape, 1, random_placement(random));
  p.dx = Buffer(dtype, shape, random_placement(random));
  if (p.weight.given()) p.d_weight = Buffer(p.weight.dtype(), {dim});
  if (p.bias.given()) p.d_bias = Buffer(p.bias.dtype(), {dim});
  return p;
}

void forward(const Problem& p, Context context = serial_context()) {
  with_workspace(norm_forward_workspace(p.inputs(), p.options, p.outputs(), context),
                 [&](Workspace workspace) {
                   context.workspace = workspace;
                   norm_forward(p.inputs(), p.options, p.outputs(), context);
                 });
}

void backward(const Problem& p, Context context = serial_context()) {
  with_workspace(norm_backward_workspace(p.backward_inputs(), p.options, p.gradients(), context),
                 [&](Workspace workspace) {
                   context.workspace = workspace;
                   norm_backward(p.backward_inputs(), p.options, p.gradients(), context);
                 });
}

// x + residual as it is stored.
Buffer stored_sum(const Problem& p) {
  if (!p.residual.given()) return p.x;
  Buffer sum(p.x.dtype(), p.x.shape());
  std::vector<double> values = p.x.values();
  const std::vector<double> more = p.residual.values();
  for (std::size_t n = 0; n < values.size(); ++n) values[n] += more[n];
  sum.set_values(values);
  return sum;
}

// The same in f64, from the sum as it is stored, so that the truth is of what was normalised.
Problem exact_problem(const Problem& p) {
  Problem e;
  e.options = p.options;
  e.options.kernel = "reference";
  e.x = exact(stored_sum(p));
  e.weight = exact(p.weight);
  e.bias = exact(p.bias);
  e.dy = exact(p.dy);
  e.d_sum = exact(p.d_sum);
  for (const auto member :
       {&Problem::y, &Problem::rstd, &Problem::mean, &Problem::dx, &Problem::d_weight, &Problem::d_bias}) {
    if ((p.*member).given()) e.*member = Buffer(DType::f64, (p.*member).shape());
  }
  return e;
}

// In f32, as frameworks do inside, and rounded at the end.
struct PlainNorm {
  Plain y, dx, d_weight, d_bias;

  explicit PlainNorm(const Problem& p)
      : y(p.x), dx(p.x), d_weight(p.x.dtype(), 1, p.x.extent(1)), d_bias(p.x.dtype(), 1, p.x.extent(1)) {
    const Plain x(stored_sum(p));
    const bool layer = p.options.norm == Norm::layer;
    const auto number = [](double v) { return static_cast<float>(v); };
    const auto dim = static_cast<float>(x.columns);
    std::vector<float> weights(d_weight.values.size()), biases(weights.size());
    for (std::int64_t m = 0; m < x.rows; ++m) {
      float mean = 0, squares = 0, sum = 0, product = 0;
      for (std::int64_t d = 0; d < x.columns; ++d) mean += number(x.at(m, d));
      mean = layer ? mean / dim : 0;
      for (std::int64_t d = 0; d < x.columns; ++d) {
        squares += (number(x.at(m, d)) - mean) * (number(x.at(m, d)) - mean);
      }
      const float rstd = 1 / std::sqrt(squares / dim + p.options.epsilon);
      const auto normal = [&](std::int64_t d) { return (number(x.at(m, d)) - mean) * rstd; };
      const auto weight = [&](std::int64_t d) { return number(p.weight.given() ? p.weight.at(d) : 1); };
      const auto g = [&](std::int64_t d) { return number(p.dy.at(m, d)) * weight(d); };
      for (std::int64_t d = 0; d < x.columns; ++d) {
        const float bias = number(p.bias.given() ? p.bias.at(d) : 0);
        y.at(m, d) = rounded_to(y.dtype, static_cast<double>(normal(d) * weight(d) + bias));
        sum += layer ? g(d) : 0;
        product += g(d) * normal(d);
        weights[static_cast<std::size_t>(d)] += number(p.dy.at(m, d)) * normal(d);
        biases[static_cast<std::size_t>(d)] += number(p.dy.at(m, d));
      }
      for (std::int64_t d = 0; d < x.columns; ++d) {
        double value = static_cast<double>(rstd * (g(d) - sum / dim - normal(d) * product / dim));
        if (p.d_sum.given()) value = rounded_to(dx.dtype, value) + p.d_sum.at(m, d);
        dx.at(m, d) = rounded_to(dx.dtype, value);
      }
    }
    for (std::size_t d = 0; d < weights.size(); ++d) {
      const DType dtype = p.d_weight.given() ? p.d_weight.dtype()
                          : p.d_bias.given() ? p.d_bias.dtype()
                                             : DType::f32;
      d_weight.values[d] = rounded_to(dtype, static_cast<double>(weights[d]));
      d_bias.values[d] = rounded_to(dtype, static_cast<double>(biases[d]));
    }
  }
};

void check(Problem& p, const Context& context) {
  const Problem e = exact_problem(p);
  const PlainNorm plain(p);
  forward(e);
  forward(p, context);
  if (p.sum.given()) {
    EXPECT_EQ(p.sum.bytes(), stored_sum(p).bytes());
  }
  expect_near(p.y, e.y.values(), plain.y, "y", 1);
  EXPECT_TRUE(p.rstd.guards_intact() && p.rstd.all_written());
  backward(e);
  backward(p, context);
  expect_near(p.dx, e.dx.values(), plain.dx, "dx", 2);
  // Products of two normal numbers reach 4, and partial sums of them 4·√rows.
  const double terms = 4 * std::sqrt(static_cast<double>(p.x.extent(0)));
  if (p.d_weight.given()) expect_near(p.d_weight, e.d_weight.values(), plain.d_weight, "d_weight", terms);
  if (p.d_bias.given()) expect_near(p.d_bias, e.d_bias.values(), plain.d_bias, "d_bias", terms);
}

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
      {"y: expected memory apart from residual, got an overlap", [](Problem& p) { p.residual = p.y; }},
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
  EXPECT_EQ(thrown<InvalidArgument>([&] { backward(p); }), "rstd: expected that of forward, got none");
}

}  // namespace
}  // namespace tilewise::test
