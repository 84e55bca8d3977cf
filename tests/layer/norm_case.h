#pragma once

#include <array>

#include "layer/plain.h"

// Random problems of norm and what is expected of them, on any device.

namespace tilewise::test::norm_case {

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

inline Problem random_problem(Random& random, std::int64_t rows, std::int64_t dim, DType dtype, Norm norm) {
  Problem p;
  const Shape shape = {rows, dim};
  p.options.norm = norm;
  p.options.epsilon = 1e-5f;
  const Placement placement = random_placement(random);
  p.x = random_buffer(random, dtype, shape, random.log_uniform(0.1, 10), placement);
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

inline void forward(const Problem& p, const Context& context = serial_context()) {
  NormInputs in = p.inputs();
  NormOutputs out = p.outputs();
  call_on(
      context, {&in.x, &in.residual, &in.weight, &in.bias, &out.y, &out.sum, &out.rstd, &out.mean},
      [&](const Context& c) { return norm_forward_workspace(in, p.options, out, c); },
      [&](const Context& c) { norm_forward(in, p.options, out, c); });
}

inline void backward(const Problem& p, const Context& context = serial_context()) {
  NormInputs in = p.backward_inputs();
  NormGradients g = p.gradients();
  call_on(
      context,
      {&in.x, &in.weight, &in.bias, &g.dy, &g.d_sum, &g.rstd, &g.mean, &g.dx, &g.d_weight, &g.d_bias},
      [&](const Context& c) { return norm_backward_workspace(in, p.options, g, c); },
      [&](const Context& c) { norm_backward(in, p.options, g, c); });
}

// x + residual as it is stored.
inline Buffer stored_sum(const Problem& p) {
  if (!p.residual.given()) return p.x;
  Buffer sum(p.x.dtype(), p.x.shape());
  std::vector<double> values = p.x.values();
  const std::vector<double> more = p.residual.values();
  for (std::size_t n = 0; n < values.size(); ++n) values[n] += more[n];
  sum.set_values(values);
  return sum;
}

// The same in f64, from the sum as it is stored, so that the truth is of what was normalised.
inline Problem exact_problem(const Problem& p) {
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

inline void check(Problem& p, const Context& context) {
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

}  // namespace tilewise::test::norm_case
