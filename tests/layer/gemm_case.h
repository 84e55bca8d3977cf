#pragma once

#include "layer/plain.h"

// Random problems of gemm and what is expected of them, on any device.

namespace tilewise::test::gemm_case {

struct Problem {
  Buffer a, b, bias, gate, gate_bias, residual, out;
  GemmOptions options;

  GemmInputs inputs() const {
    return {a.view(), b.view(), bias.view(), gate.view(), gate_bias.view(), residual.view()};
  }
};

struct Sizes {
  std::int64_t m, n, k;
};

inline Problem random_problem(Random& random, Sizes n, DType dtype, Activation activation, bool gated) {
  Problem p;
  const double deviation = 1 / std::sqrt(std::max<double>(static_cast<double>(n.k), 1));
  const Placement weights = random_placement(random, random.chance(0.3));
  p.a = random_buffer(random, dtype, {n.m, n.k}, 1, random_placement(random, random.chance(0.3)));
  p.b = random_buffer(random, dtype, {n.n, n.k}, deviation, weights);
  const auto bias = [&] {
    const Placement placement = random_placement(random);
    return random_buffer(random, random.chance(0.3) ? DType::f32 : dtype, {n.n}, 1, placement);
  };
  if (random.chance(0.5)) p.bias = bias();
  if (gated) {
    p.gate = random_buffer(random, dtype, {n.n, n.k}, deviation, weights);
    if (random.chance(0.5)) p.gate_bias = bias();
  }
  const DType out = random.chance(0.2) ? DType::f32 : dtype;
  if (random.chance(0.4)) p.residual = random_buffer(random, out, {n.m, n.n}, 1, random_placement(random));
  p.options.activation = activation;
  p.options.accumulate = random.chance(0.3);
  p.out = random_buffer(random, out, {n.m, n.n}, 1, random_placement(random));
  if (!p.options.accumulate) p.out.poison();
  return p;
}

inline void run(const GemmInputs& inputs, const GemmOptions& options, const Buffer& out,
                const Context& context) {
  GemmInputs in = inputs;
  GemmOutputs outputs{out.view()};
  call_on(
      context, {&in.a, &in.b, &in.bias, &in.gate, &in.gate_bias, &in.residual, &outputs.out},
      [&](const Context& c) { return gemm_workspace(in, options, outputs, c); },
      [&](const Context& c) { gemm(in, options, outputs, c); });
}

inline std::vector<double> truth_of(const Problem& p) {
  Buffer a = exact(p.a), b = exact(p.b), bias = exact(p.bias), gate = exact(p.gate);
  Buffer gate_bias = exact(p.gate_bias), residual = exact(p.residual), out = exact(p.out);
  GemmOptions options = p.options;
  options.kernel = "reference";
  run({a.view(), b.view(), bias.view(), gate.view(), gate_bias.view(), residual.view()}, options, out, {});
  return out.values();
}

inline Plain plain_of(const Problem& p) {
  const DType dtype = p.out.dtype();
  const Plain a(p.a), b(p.b);
  Plain result = plain_linear(a, b, p.bias, dtype);
  const auto pass = [&](const Plain& x) {
    return plain_map(
        x, [&](double v, std::int64_t, std::int64_t) { return plain_activated(p.options.activation, v); });
  };
  if (p.gate.given()) {
    const Plain open = pass(plain_linear(a, Plain(p.gate), p.gate_bias, dtype));
    result = plain_map(result, [&](double v, std::int64_t r, std::int64_t c) { return v * open.at(r, c); });
  } else {
    result = pass(result);
  }
  for (const Buffer* addend : {&p.residual, p.options.accumulate ? &p.out : nullptr}) {
    if (addend == nullptr || !addend->given()) continue;
    const Plain more(*addend);
    result = plain_map(result, [&](double v, std::int64_t r, std::int64_t c) { return v + more.at(r, c); });
  }
  return result;
}

inline void check(Problem& p, const Context& context) {
  const std::vector<double> truth = truth_of(p);
  const Plain plain = plain_of(p);
  run(p.inputs(), p.options, p.out, context);
  expect_near(p.out, truth, plain, "out", 4);
}

}  // namespace tilewise::test::gemm_case
