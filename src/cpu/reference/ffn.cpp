#include "core/activation.h"
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/reference/elements.h"
#include "ffn/kernel.h"

namespace tilewise::cpu {
namespace {

// Arrays [tokens, F] of the hidden layer. Backward keeps them for all tokens, forward for one token per
// worker.
struct Hidden {
  double* h;
  double* up;    // the gradient of x·upᵀ + up_bias, in backward
  double* gate;  // the gradient of x·gateᵀ + gate_bias, likewise
};

Hidden take_hidden(Arena& arena, const FfnCall& call, std::int64_t tokens) {
  const std::int64_t hidden = call.problem.hidden;
  const bool backward = call.problem.pass == Pass::backward;
  return {.h = arena.take<double>(tokens, hidden),
          .up = arena.take<double>(backward ? tokens : 0, hidden),
          .gate = arena.take<double>(backward && call.problem.gated ? tokens : 0, hidden)};
}

void forward_token(const FfnCall& call, std::int64_t m, const Hidden& hidden) {
  const FfnProblem& problem = call.problem;
  for (std::int64_t f = 0; f < problem.hidden; ++f) {
    const double up = product(call.x, call.up, call.up_bias, m, f);
    const double gate = problem.gated ? product(call.x, call.gate, call.gate_bias, m, f) : 0;
    hidden.h[f] =
        problem.gated ? activated(problem.activation, gate) * up : activated(problem.activation, up);
    if (!problem.kept) continue;
    store(call.up_product, m, f, up);
    if (problem.gated) store(call.gate_product, m, f, gate);
  }
  for (std::int64_t o = 0; o < problem.out; ++o) {
    double sum = element(call.down_bias, o);
    for (std::int64_t f = 0; f < problem.hidden; ++f) sum += hidden.h[f] * element(call.down, o, f);
    if (problem.residual) sum += element(call.residual, m, o);
    store(call.out, m, o, sum);
  }
}

// Computes h and the gradients of the up and gate products for one token, then its dx.
void backward_token(const FfnCall& call, std::int64_t m, const Hidden& hidden) {
  const FfnProblem& problem = call.problem;
  for (std::int64_t f = 0; f < problem.hidden; ++f) {
    const std::int64_t at = m * problem.hidden + f;
    double dh = 0;
    for (std::int64_t o = 0; o < problem.out; ++o) dh += element(call.d_out, m, o) * element(call.down, o, f);
    const double up =
        problem.kept ? element(call.up_product, m, f) : product(call.x, call.up, call.up_bias, m, f);
    if (problem.gated) {
      const double gate =
          problem.kept ? element(call.gate_product, m, f) : product(call.x, call.gate, call.gate_bias, m, f);
      const double open = activated(problem.activation, gate);
      hidden.h[at] = open * up;
      hidden.up[at] = dh * open;
      hidden.gate[at] = dh * up * activation_derivative(problem.activation, gate);
    } else {
      hidden.h[at] = activated(problem.activation, up);
      hidden.up[at] = dh * activation_derivative(problem.activation, up);
    }
  }
  if (call.dx.data == nullptr) return;
  for (std::int64_t e = 0; e < problem.embed; ++e) {
    double sum = 0;
    for (std::int64_t f = 0; f < problem.hidden; ++f) {
      const std::int64_t at = m * problem.hidden + f;
      sum += hidden.up[at] * element(call.up, f, e);
      if (problem.gated) sum += hidden.gate[at] * element(call.gate, f, e);
    }
    store(call.dx, m, e, sum);
  }
}

// Row f of the gradient of the up or gate weights and of their bias.
void weight_gradients(const FfnCall& call, const double* d_product, std::int64_t f, const Matrix& d_weight,
                      const Vector& d_bias) {
  const FfnProblem& problem = call.problem;
  if (d_weight.data != nullptr) {
    for (std::int64_t e = 0; e < problem.embed; ++e) {
      double sum = 0;
      for (std::int64_t m = 0; m < problem.tokens; ++m) {
        sum += d_product[m * problem.hidden + f] * element(call.x, m, e);
      }
      store(d_weight, f, e, sum);
    }
  }
  if (d_bias.data == nullptr) return;
  double sum = 0;
  for (std::int64_t m = 0; m < problem.tokens; ++m) sum += d_product[m * problem.hidden + f];
  store(d_bias, f, sum);
}

void backward(const FfnCall& call, const Hidden& hidden, const Context& context) {
  const FfnProblem& problem = call.problem;
  for_each_task(context.parallel_for, problem.tokens,
                [&](std::int64_t, std::int64_t m) { backward_token(call, m, hidden); });
  for_each_task(context.parallel_for, problem.hidden, [&](std::int64_t, std::int64_t f) {
    weight_gradients(call, hidden.up, f, call.d_up, call.d_up_bias);
    if (problem.gated) weight_gradients(call, hidden.gate, f, call.d_gate, call.d_gate_bias);
  });
  for_each_task(context.parallel_for, problem.out, [&](std::int64_t, std::int64_t o) {
    double bias = 0;
    for (std::int64_t m = 0; m < problem.tokens; ++m) bias += element(call.d_out, m, o);
    if (call.d_down_bias.data != nullptr) {
      store(call.d_down_bias, o, bias);
    }
    if (call.d_down.data == nullptr) return;
    for (std::int64_t f = 0; f < problem.hidden; ++f) {
      double sum = 0;
      for (std::int64_t m = 0; m < problem.tokens; ++m) {
        sum += element(call.d_out, m, o) * hidden.h[m * problem.hidden + f];
      }
      store(call.d_down, o, f, sum);
    }
  });
}

std::string supports(const FfnProblem& problem) {
  return problem.device.type == Device::Type::cpu ? "" : "runs on the CPU only";
}

std::size_t workspace(const FfnCall& call, const Context& context) {
  Arena arena(nullptr);
  const bool forward = call.problem.pass == Pass::forward;
  const std::int64_t tokens = call.problem.tokens;
  take_hidden(arena, call, forward ? workers_for(context.parallel_for, tokens) : tokens);
  return arena.used();
}

void launch(const FfnCall& call, const Context& context) {
  Arena arena(context.workspace.data);
  if (call.problem.pass == Pass::backward) {
    return backward(call, take_hidden(arena, call, call.problem.tokens), context);
  }
  const Hidden hidden = take_hidden(arena, call, workers_for(context.parallel_for, call.problem.tokens));
  for_each_task(context.parallel_for, call.problem.tokens, [&](std::int64_t worker, std::int64_t m) {
    forward_token(call, m, {.h = hidden.h + worker * call.problem.hidden, .up = nullptr, .gate = nullptr});
  });
}

}  // namespace

constinit const FfnKernel reference_ffn = {
    .name = "reference", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cpu
