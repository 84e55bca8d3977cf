#pragma once

#include <array>

#include "core/activation.h"
#include "layer/plain.h"

// Random problems of ffn and what is expected of them, on any device.

namespace tilewise::test::ffn_case {

struct Problem {
  Buffer x, up, gate, down, up_bias, gate_bias, down_bias, residual, out;
  Buffer d_out, dx, d_up, d_gate, d_down, d_up_bias, d_gate_bias, d_down_bias;
  Buffer up_product, gate_product;  // where forward keeps them
  FfnOptions options;

  FfnInputs inputs() const {
    return {x.view(),       up.view(),        gate.view(),      down.view(),
            up_bias.view(), gate_bias.view(), down_bias.view(), residual.view()};
  }
  FfnOutputs outputs() const { return {out.view(), up_product.view(), gate_product.view()}; }
  FfnGradients gradients() const {
    return {d_out.view(),     dx.view(),          d_up.view(),        d_gate.view(),     d_down.view(),
            d_up_bias.view(), d_gate_bias.view(), d_down_bias.view(), up_product.view(), gate_product.view()};
  }
  /// Room for the products.
  void keep(Random& random) {
    const Shape shape{x.extent(0), up.extent(0)};
    up_product = Buffer(x.dtype(), shape, random_placement(random));
    up_product.poison();
    if (!gate.given()) return;
    gate_product = Buffer(x.dtype(), shape, random_placement(random));
    gate_product.poison();
  }
  /// Each gradient beside what it is of.
  std::array<std::pair<Buffer*, const Buffer*>, 7> pairs() {
    return {{{&dx, &x},
             {&d_up, &up},
             {&d_gate, &gate},
             {&d_down, &down},
             {&d_up_bias, &up_bias},
             {&d_gate_bias, &gate_bias},
             {&d_down_bias, &down_bias}}};
  }
  void make_gradients(Random* random = nullptr) {
    for (const auto& [gradient, of] : pairs()) {
      if (!of->given()) continue;
      const Placement placement = random == nullptr ? Placement() : random_placement(*random);
      *gradient = Buffer(of->dtype(), of->shape(), placement);
      gradient->poison();
    }
  }
};

struct Sizes {
  std::int64_t tokens, embed, hidden, out;
};

inline Problem random_problem(Random& random, Sizes n, DType dtype, Activation activation, bool gated) {
  Problem p;
  const auto weight = [&](std::int64_t rows, std::int64_t columns) {
    const double deviation = 1 / std::sqrt(std::max<double>(static_cast<double>(columns), 1));
    return random_buffer(random, dtype, {rows, columns}, deviation, random_placement(random));
  };
  const auto bias = [&](std::int64_t count) {
    return random.chance(0.6) ? random_buffer(random, dtype, {count}, 0.5) : Buffer();
  };
  p.x = random_buffer(random, dtype, {n.tokens, n.embed}, 1, random_placement(random));
  p.up = weight(n.hidden, n.embed);
  p.up_bias = bias(n.hidden);
  if (gated) {
    p.gate = weight(n.hidden, n.embed);
    p.gate_bias = bias(n.hidden);
  }
  p.down = weight(n.out, n.hidden);
  p.down_bias = bias(n.out);
  if (random.chance(0.5)) p.residual = random_buffer(random, dtype, {n.tokens, n.out});
  p.out = Buffer(dtype, {n.tokens, n.out}, random_placement(random));
  p.out.poison();
  p.d_out = random_buffer(random, dtype, {n.tokens, n.out}, 1, random_placement(random));
  p.make_gradients(&random);
  p.options.activation = activation;
  return p;
}

inline Problem exact_problem(const Problem& p) {
  Problem e;
  for (const auto member :
       {&Problem::x, &Problem::up, &Problem::gate, &Problem::down, &Problem::up_bias, &Problem::gate_bias,
        &Problem::down_bias, &Problem::residual, &Problem::out, &Problem::d_out}) {
    e.*member = exact(p.*member);
  }
  e.make_gradients();
  e.options = p.options;
  e.options.kernel = "reference";
  return e;
}

inline std::vector<Tensor*> tensors_of(FfnInputs& in) {
  return {&in.x, &in.up, &in.gate, &in.down, &in.up_bias, &in.gate_bias, &in.down_bias, &in.residual};
}

inline void forward(const Problem& p, const Context& context = serial_context()) {
  FfnInputs in = p.inputs();
  FfnOutputs out = p.outputs();
  std::vector<Tensor*> tensors = tensors_of(in);
  tensors.insert(tensors.end(), {&out.out, &out.up_product, &out.gate_product});
  call_on(
      context, tensors, [&](const Context& c) { return ffn_forward_workspace(in, p.options, out, c); },
      [&](const Context& c) { ffn_forward(in, p.options, out, c); });
}

inline void backward(const Problem& p, const Context& context = serial_context()) {
  FfnInputs in = p.inputs();
  FfnGradients g = p.gradients();
  std::vector<Tensor*> tensors = tensors_of(in);
  tensors.insert(tensors.end(), {&g.d_out, &g.dx, &g.d_up, &g.d_gate, &g.d_down, &g.d_up_bias, &g.d_gate_bias,
                                 &g.d_down_bias, &g.up_product, &g.gate_product});
  call_on(
      context, tensors, [&](const Context& c) { return ffn_backward_workspace(in, p.options, g, c); },
      [&](const Context& c) { ffn_backward(in, p.options, g, c); });
}

// The steps a framework takes.
struct PlainSteps {
  Plain up, gate, h;

  explicit PlainSteps(const Problem& p)
      : up(plain_linear(Plain(p.x), Plain(p.up), p.up_bias, p.x.dtype())),
        gate(p.gate.given() ? plain_linear(Plain(p.x), Plain(p.gate), p.gate_bias, p.x.dtype()) : up),
        h(plain_map(gate, [&](double v, std::int64_t, std::int64_t) {
          return plain_activated(p.options.activation, v);
        })) {
    if (!p.gate.given()) return;
    h = plain_map(h, [&](double v, std::int64_t r, std::int64_t c) { return v * up.at(r, c); });
  }
};

inline Plain plain_forward(const Problem& p) {
  const PlainSteps steps(p);
  Plain out = plain_linear(steps.h, Plain(p.down), p.down_bias, p.x.dtype());
  if (!p.residual.given()) return out;
  return plain_map(out, [&](double v, std::int64_t r, std::int64_t c) { return v + p.residual.at(r, c); });
}

inline Plain plain_sums(const Plain& x) {
  return Plain::of(x.dtype, 1, x.columns, [&](std::int64_t, std::int64_t c) {
    float sum = 0;
    for (std::int64_t r = 0; r < x.rows; ++r) sum += static_cast<float>(x.at(r, c));
    return static_cast<double>(sum);
  });
}

// In the order of Problem::pairs().
inline std::vector<Plain> plain_backward(const Problem& p) {
  const DType dtype = p.x.dtype();
  const PlainSteps steps(p);
  const Plain x(p.x), d_out(p.d_out), none(dtype, 0, 0);
  const Plain dh = plain_linear(d_out, Plain(p.down).transposed(), {}, dtype);
  const auto slope = [&](double v) { return activation_derivative(p.options.activation, v); };
  const bool gated = p.gate.given();
  const Plain du = plain_map(dh, [&](double v, std::int64_t r, std::int64_t c) {
    return v *
           (gated ? plain_activated(p.options.activation, steps.gate.at(r, c)) : slope(steps.up.at(r, c)));
  });
  const Plain dg = plain_map(dh, [&](double v, std::int64_t r, std::int64_t c) {
    return v * steps.up.at(r, c) * slope(steps.gate.at(r, c));
  });
  Plain dx = plain_linear(du, Plain(p.up).transposed(), {}, dtype);
  if (gated) {
    const Plain more = plain_linear(dg, Plain(p.gate).transposed(), {}, dtype);
    dx = plain_map(dx, [&](double v, std::int64_t r, std::int64_t c) { return v + more.at(r, c); });
  }
  const auto weight = [&](const Plain& d, const Plain& input) {
    return plain_linear(d.transposed(), input.transposed(), {}, dtype);
  };
  return {dx,
          weight(du, x),
          gated ? weight(dg, x) : none,
          weight(d_out, steps.h),
          plain_sums(du),
          gated ? plain_sums(dg) : none,
          plain_sums(d_out)};
}

inline void check_forward(Problem& p, const Context& context) {
  const Problem e = exact_problem(p);
  forward(e);
  forward(p, context);
  expect_near(p.out, e.out.values(), plain_forward(p), "out", 2);
}

inline void check_backward(Problem& p, const Context& context) {
  Problem e = exact_problem(p);
  backward(e);
  backward(p, context);
  const std::vector<Plain> plain = plain_backward(p);
  constexpr const char* names[] = {"dx",        "d_up",        "d_gate",     "d_down",
                                   "d_up_bias", "d_gate_bias", "d_down_bias"};
  for (std::size_t n = 0; n < plain.size(); ++n) {
    const Buffer& got = *p.pairs()[n].first;
    if (!got.given()) continue;
    const double terms = 2 * std::sqrt(static_cast<double>(p.x.extent(0)));
    expect_near(got, e.pairs()[n].first->values(), plain[n], names[n], terms);
  }
}

/// Both passes with products kept: they are what a framework's are, and backward reads them and not x's.
inline void check_kept(Problem& p, Random& random, const Context& context) {
  p.keep(random);
  check_forward(p, context);
  const PlainSteps steps(p);
  const auto check_product = [&](const Buffer& product, const Buffer& weight, const Buffer& bias,
                                 const Plain& plain, const char* name) {
    const std::vector<double> x = p.x.values(), w = weight.values();
    const std::vector<double> b = bias.given() ? bias.values() : std::vector<double>();
    const auto width = static_cast<std::size_t>(p.x.extent(1));
    std::vector<double> truth;
    for (std::size_t m = 0; m < static_cast<std::size_t>(p.x.extent(0)); ++m) {
      for (std::size_t f = 0; f < static_cast<std::size_t>(weight.extent(0)); ++f) {
        double sum = b.empty() ? 0 : b[f];
        for (std::size_t e = 0; e < width; ++e) sum += x[m * width + e] * w[f * width + e];
        truth.push_back(sum);
      }
    }
    expect_near(product, truth, plain, name, 2);
  };
  check_product(p.up_product, p.up, p.up_bias, steps.up, "up_product");
  if (p.gate.given()) check_product(p.gate_product, p.gate, p.gate_bias, steps.gate, "gate_product");
  const std::vector<std::byte> before = p.up_product.bytes();
  check_backward(p, context);
  EXPECT_EQ(before, p.up_product.bytes());  // read alone
  if (p.x.size() == 0 || p.up.size() == 0 || !p.d_down.given()) return;
  // Products of zeros make h = f(0), which is 0 of all activations: so does the gradient of down.
  p.up_product.set_values(std::vector<double>(static_cast<std::size_t>(p.up_product.size()), 0.0));
  if (p.gate.given()) {
    p.gate_product.set_values(std::vector<double>(static_cast<std::size_t>(p.gate_product.size()), 0.0));
  }
  backward(p, context);
  for (const double value : p.d_down.values()) ASSERT_EQ(value, 0.0);
}

}  // namespace tilewise::test::ffn_case
