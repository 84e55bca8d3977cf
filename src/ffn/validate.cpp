#include "ffn/validate.h"

#include <tuple>

#include "ffn/kernel.h"
#include "gemm/checks.h"

namespace tilewise {
namespace {

// Everything but outputs and gradients.
FfnCall checked_inputs(Pass pass, const FfnInputs& inputs, const FfnOptions& options,
                       const Context& context) {
  check_kernel_name(ffn_kernel_list(), options.kernel);
  check_context(context);
  check_activation(options.activation);
  check_precision(options.precision);
  const Tensor& x = inputs.x;
  check(x.rank == 2, "x", "rank 2 [M, E]", x);
  check(is_floating(x.dtype), "x", "f32, f16, bf16 or f64", to_string(x.dtype));
  check_memory(x, "x", context);
  check_contiguous_last(x, "x");
  const std::int64_t embed = x.extent(1);
  check(
      inputs.up.rank == 2 && inputs.up.extent(1) == embed, "up",
      [&] { return "rank 2 [F, E] with E " + std::to_string(embed); }, inputs.up);
  check_matrix(inputs.up, "up", x.dtype, context);
  const std::int64_t hidden = inputs.up.extent(0);
  check(
      inputs.down.rank == 2 && inputs.down.extent(1) == hidden, "down",
      [&] { return "rank 2 [O, F] with F " + std::to_string(hidden); }, inputs.down);
  const std::int64_t out = inputs.down.extent(0);
  check(
      !inputs.gate.given() || has_shape(inputs.gate, {hidden, embed}), "gate",
      [&] { return "the shape of up, " + shape_string(inputs.up); }, inputs.gate);
  if (inputs.gate.given()) check_matrix(inputs.gate, "gate", x.dtype, context);
  check_matrix(inputs.down, "down", x.dtype, context);
  check(inputs.gate.given() || !inputs.gate_bias.given(), "gate_bias", "a gate to add it to", "no gate");
  check(!inputs.gate.given() || options.activation != Activation::none, "activation",
        "an activation for the gate", "none");
  check_bias(inputs.up_bias, "up_bias", hidden, x.dtype, context);
  check_bias(inputs.gate_bias, "gate_bias", hidden, x.dtype, context);
  check_bias(inputs.down_bias, "down_bias", out, x.dtype, context);

  FfnCall call{.problem = {},
               .max_intermediate_bytes = options.max_intermediate_bytes,
               .x = matrix_of(x),
               .up = matrix_of(inputs.up),
               .gate = matrix_of(inputs.gate),
               .down = matrix_of(inputs.down),
               .up_bias = vector_of(inputs.up_bias),
               .gate_bias = vector_of(inputs.gate_bias),
               .down_bias = vector_of(inputs.down_bias)};
  if (inputs.gate.given()) check_same_layout(call.gate, "gate", call.up, "up");
  call.problem = {
      .pass = pass,
      .device = context.device,
      .dtype = x.dtype,
      .tokens = x.extent(0),
      .embed = embed,
      .hidden = hidden,
      .out = out,
      .activation = options.activation,
      .gated = inputs.gate.given(),
      .bias = inputs.up_bias.given() || inputs.gate_bias.given() || inputs.down_bias.given(),
      .residual = inputs.residual.given() && pass == Pass::forward,
      .allow_tf32 = options.precision == Precision::allow_tf32,
      .by_rows = call.up.by_rows() && call.down.by_rows(),
      .aligned = call.x.aligned() && call.up.aligned() && call.gate.aligned() && call.down.aligned()};
  return call;
}

void check_rows(const Tensor& tensor, std::string_view name, Shape shape, std::string_view meaning,
                DType dtype, const Context& context) {
  check_shape(tensor, name, shape, meaning, context);
  check_dtype(tensor, name, dtype);
  check_contiguous_last(tensor, name);
}

void check_gradient(const Tensor& gradient, std::string_view name, const Tensor& of, std::string_view of_name,
                    const Context& context) {
  if (!gradient.given()) return;
  check(of.given(), name, [&] { return std::string(of_name) + " to differentiate"; }, "none");
  check(
      same_shape(gradient, of), name,
      [&] { return "the shape of " + std::string(of_name) + ", " + shape_string(of); }, gradient);
  check_memory(gradient, name, context);
  check_dtype(gradient, name, of.dtype);
  check_contiguous_last(gradient, name);
}

// Takes the products before the activation that forward keeps for backward: up's and the gate's, or none.
void take_products(FfnCall& call, const Tensor& up, const Tensor& gate, const Context& context) {
  FfnProblem& problem = call.problem;
  check(problem.gated || !gate.given(), "gate_product", "none without a gate", gate);
  if (!up.given() && !gate.given()) return;
  const auto take = [&](const Tensor& product, std::string_view name) {
    check_rows(product, name, {problem.tokens, problem.hidden}, "[M, F]", problem.dtype, context);
    const Matrix matrix = matrix_of(product);
    problem.aligned = problem.aligned && matrix.aligned();
    return matrix;
  };
  call.up_product = take(up, "up_product");
  if (problem.gated) call.gate_product = take(gate, "gate_product");
  problem.kept = true;
}

}  // namespace

FfnCall checked_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                            const Context& context) {
  FfnCall call = checked_inputs(Pass::forward, inputs, options, context);
  FfnProblem& problem = call.problem;
  check_rows(outputs.out, "out", {problem.tokens, problem.out}, "[M, O]", problem.dtype, context);
  if (inputs.residual.given()) {
    check_rows(inputs.residual, "residual", {problem.tokens, problem.out}, "[M, O]", problem.dtype, context);
  }
  take_products(call, outputs.up_product, outputs.gate_product, context);
  const Tensor none;
  const bool in_place = same_view(inputs.residual, outputs.out);
  check_written(
      {{"out", &outputs.out}, {"up_product", &outputs.up_product}, {"gate_product", &outputs.gate_product}},
      {{"x", &inputs.x},
       {"up", &inputs.up},
       {"gate", &inputs.gate},
       {"down", &inputs.down},
       {"up_bias", &inputs.up_bias},
       {"gate_bias", &inputs.gate_bias},
       {"down_bias", &inputs.down_bias},
       {"residual", in_place ? &none : &inputs.residual}});
  call.residual = matrix_of(inputs.residual);
  call.out = matrix_of(outputs.out);
  problem.aligned = problem.aligned && call.residual.aligned() && call.out.aligned();
  return call;
}

FfnCall checked_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                             const FfnGradients& gradients, const Context& context) {
  FfnCall call = checked_inputs(Pass::backward, inputs, options, context);
  FfnProblem& problem = call.problem;
  check_rows(gradients.d_out, "d_out", {problem.tokens, problem.out}, "[M, O]", problem.dtype, context);
  for (const auto& [gradient, name, of, of_name] :
       {std::tuple(&gradients.dx, "dx", &inputs.x, "x"),
        std::tuple(&gradients.d_up, "d_up", &inputs.up, "up"),
        std::tuple(&gradients.d_gate, "d_gate", &inputs.gate, "gate"),
        std::tuple(&gradients.d_down, "d_down", &inputs.down, "down"),
        std::tuple(&gradients.d_up_bias, "d_up_bias", &inputs.up_bias, "up_bias"),
        std::tuple(&gradients.d_gate_bias, "d_gate_bias", &inputs.gate_bias, "gate_bias"),
        std::tuple(&gradients.d_down_bias, "d_down_bias", &inputs.down_bias, "down_bias")}) {
    check_gradient(*gradient, name, *of, of_name, context);
  }
  take_products(call, gradients.up_product, gradients.gate_product, context);
  check_written({{"dx", &gradients.dx},
                 {"d_up", &gradients.d_up},
                 {"d_gate", &gradients.d_gate},
                 {"d_down", &gradients.d_down},
                 {"d_up_bias", &gradients.d_up_bias},
                 {"d_gate_bias", &gradients.d_gate_bias},
                 {"d_down_bias", &gradients.d_down_bias}},
                {{"x", &inputs.x},
                 {"up", &inputs.up},
                 {"gate", &inputs.gate},
                 {"down", &inputs.down},
                 {"up_bias", &inputs.up_bias},
                 {"gate_bias", &inputs.gate_bias},
                 {"down_bias", &inputs.down_bias},
                 {"d_out", &gradients.d_out},
                 {"up_product", &gradients.up_product},
                 {"gate_product", &gradients.gate_product}});
  call.d_out = matrix_of(gradients.d_out);
  call.dx = matrix_of(gradients.dx);
  call.d_up = matrix_of(gradients.d_up);
  call.d_gate = matrix_of(gradients.d_gate);
  call.d_down = matrix_of(gradients.d_down);
  call.d_up_bias = vector_of(gradients.d_up_bias);
  call.d_gate_bias = vector_of(gradients.d_gate_bias);
  call.d_down_bias = vector_of(gradients.d_down_bias);
  problem.aligned = problem.aligned && call.d_out.aligned() && call.dx.aligned() && call.d_up.aligned() &&
                    call.d_gate.aligned() && call.d_down.aligned();
  return call;
}

}  // namespace tilewise
