#include <array>

#include "core/activation.h"
#include "layer/plain.h"

namespace tilewise::test {
namespace {

struct Problem {
  Buffer x, up, gate, down, up_bias, gate_bias, down_bias, residual, out;
  Buffer d_out, dx, d_up, d_gate, d_down, d_up_bias, d_gate_bias, d_down_bias;
  FfnOptions options;

  FfnInputs inputs() const {
    return {x.view(),       up.view(),        gate.view(),      down.view(),
            up_bias.view(), gate_bias.view(), down_bias.view(), residual.view()};
  }
  FfnOutputs outputs() const { return {out.view()}; }
  FfnGradients gradients() const {
    return {d_out.view(),  dx.view(),        d_up.view(),        d_gate.view(),
            d_down.view(), d_up_bias.view(), d_gate_bias.view(), d_down_bias.view()};
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

Problem random_problem(Random& random, Sizes n, DType dtype, Activation activation, bool gated) {
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

Problem exact_problem(const Problem& p) {
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

void forward(const Problem& p, Context context = serial_context()) {
  with_workspace(ffn_forward_workspace(p.inputs(), p.options, p.outputs(), context),
                 [&](Workspace workspace) {
                   context.workspace = workspace;
                   ffn_forward(p.inputs(), p.options, p.outputs(), context);
                 });
}

void backward(const Problem& p, Context context = serial_context()) {
  with_workspace(ffn_backward_workspace(p.inputs(), p.options, p.gradients(), context),
                 [&](Workspace workspace) {
                   context.workspace = workspace;
                   ffn_backward(p.inputs(), p.options, p.gradients(), context);
                 });
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

Plain plain_forward(const Problem& p) {
  const PlainSteps steps(p);
  Plain out = plain_linear(steps.h, Plain(p.down), p.down_bias, p.x.dtype());
  if (!p.residual.given()) return out;
  return plain_map(out, [&](double v, std::int64_t r, std::int64_t c) { return v + p.residual.at(r, c); });
}

Plain plain_sums(const Plain& x) {
  return Plain::of(x.dtype, 1, x.columns, [&](std::int64_t, std::int64_t c) {
    float sum = 0;
    for (std::int64_t r = 0; r < x.rows; ++r) sum += static_cast<float>(x.at(r, c));
    return static_cast<double>(sum);
  });
}

// In the order of Problem::pairs().
std::vector<Plain> plain_backward(const Problem& p) {
  const DType dtype = p.x.dtype();
  const PlainSteps steps(p);
  const Plain x(p.x), d_out(p.d_out), none(dtype, 0, 0);
  const Plain dh = plain_linear(d_out, Plain(p.down).transposed(), {}, dtype);
  const auto slope = [&](double v) { return activation_slope(p.options.activation, v); };
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

void check_forward(Problem& p, const Context& context) {
  const Problem e = exact_problem(p);
  forward(e);
  forward(p, context);
  expect_near(p.out, e.out.values(), plain_forward(p), "out", 2);
}

void check_backward(Problem& p, const Context& context) {
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
            "d_gate: expected a gate to differentiate, got none");
}

}  // namespace
}  // namespace tilewise::test
