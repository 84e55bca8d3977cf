#include "norm/validate.h"

#include <cmath>

#include "core/checks.h"
#include "norm/kernel.h"

namespace tilewise {
namespace {

// Checks tensors whose shape and type follow from those of x.
class BesideX {
 public:
  BesideX(const Tensor& x, const Context& context) : x_(x), context_(context) {}

  void rows(const Tensor& tensor, std::string_view name) const {
    if (!tensor.given()) return;
    check_shape(tensor, name, {x_.extent(0), x_.extent(1)}, "the shape of x", context_);
    check_dtype(tensor, name, x_.dtype);
    check_contiguous_last(tensor, name);
  }
  void statistics(const Tensor& tensor, std::string_view name) const {
    if (!tensor.given()) return;
    check_shape(tensor, name, {x_.extent(0)}, "[M]", context_);
    check_dtype(tensor, name, x_.dtype == DType::f64 ? DType::f64 : DType::f32);
  }
  void weights(const Tensor& tensor, std::string_view name) const {
    if (!tensor.given()) return;
    check_shape(tensor, name, {x_.extent(1)}, "[D]", context_);
    check(
        tensor.dtype == x_.dtype || tensor.dtype == DType::f32, name,
        [&] { return "f32 or the type of x, " + std::string(to_string(x_.dtype)); }, to_string(tensor.dtype));
    check_contiguous_last(tensor, name);
  }

 private:
  const Tensor& x_;
  const Context& context_;
};

// Everything but outputs and gradients.
NormCall checked_inputs(Pass pass, const NormInputs& inputs, const NormOptions& options,
                        const Context& context) {
  check_kernel_name(norm_kernel_list(), options.kernel);
  check_context(context);
  check_enumerator(options.norm, Norm::layer, "norm", "rms or layer");
  check(std::isfinite(options.epsilon) && options.epsilon >= 0, "epsilon", "a finite number, 0 or above",
        options.epsilon);
  const Tensor& x = inputs.x;
  check(x.rank == 2, "x", "rank 2 [M, D]", x);
  check(is_floating(x.dtype), "x", "f32, f16, bf16 or f64", to_string(x.dtype));
  check(x.extent(1) >= 1, "x", "rows of at least one element", x);
  check_memory(x, "x", context);
  check_contiguous_last(x, "x");
  const BesideX beside(x, context);
  beside.rows(inputs.residual, "residual");
  beside.weights(inputs.weight, "weight");
  check(options.norm == Norm::layer || !inputs.bias.given(), "bias", "none with an rms norm", inputs.bias);
  beside.weights(inputs.bias, "bias");
  if (inputs.weight.given() && inputs.bias.given()) check_dtype(inputs.bias, "bias", inputs.weight.dtype);

  NormCall call{.problem = {},
                .epsilon = static_cast<double>(options.epsilon),
                .x = matrix_of(x),
                .weight = vector_of(inputs.weight),
                .bias = vector_of(inputs.bias),
                .residual = matrix_of(inputs.residual)};
  call.problem = {.pass = pass,
                  .norm = options.norm,
                  .device = context.device,
                  .dtype = x.dtype,
                  .weight_dtype = inputs.weight.given() ? inputs.weight.dtype
                                  : inputs.bias.given() ? inputs.bias.dtype
                                                        : x.dtype,
                  .rows = x.extent(0),
                  .dim = x.extent(1),
                  .residual = inputs.residual.given(),
                  .weight = inputs.weight.given(),
                  .bias = inputs.bias.given(),
                  .aligned = call.x.aligned() && call.residual.aligned()};
  return call;
}

}  // namespace

NormCall checked_norm_forward(const NormInputs& inputs, const NormOptions& options,
                              const NormOutputs& outputs, const Context& context) {
  NormCall call = checked_inputs(Pass::forward, inputs, options, context);
  const BesideX beside(inputs.x, context);
  check(outputs.y.given(), "y", "the shape of x", outputs.y);
  beside.rows(outputs.y, "y");
  check(inputs.residual.given() || !outputs.sum.given(), "sum", "a residual to add", "no residual");
  beside.rows(outputs.sum, "sum");
  beside.statistics(outputs.rstd, "rstd");
  check(options.norm == Norm::layer || !outputs.mean.given(), "mean", "none with an rms norm", outputs.mean);
  beside.statistics(outputs.mean, "mean");

  // An input that an output may overwrite in place is not checked as an input.
  const Tensor none;
  const auto unless_same = [&](const Tensor& input, const Tensor& output) {
    return same_view(input, output) ? &none : &input;
  };
  const std::initializer_list<Named> vectors = {{"weight", &inputs.weight}, {"bias", &inputs.bias}};
  check_written({{"y", &outputs.y}, {"sum", &outputs.sum}, {"rstd", &outputs.rstd}, {"mean", &outputs.mean}},
                vectors);
  const Tensor& reread = inputs.residual.given() ? none : outputs.y;
  check_written({{"y", &outputs.y}, {"rstd", &outputs.rstd}, {"mean", &outputs.mean}},
                {{"x", unless_same(inputs.x, reread)}, {"residual", &inputs.residual}});
  check_written({{"sum", &outputs.sum}}, {{"x", unless_same(inputs.x, outputs.sum)},
                                          {"residual", unless_same(inputs.residual, outputs.sum)}});
  call.y = matrix_of(outputs.y);
  call.sum = matrix_of(outputs.sum);
  call.rstd = vector_of(outputs.rstd);
  call.mean = vector_of(outputs.mean);
  call.problem.aligned = call.problem.aligned && call.y.aligned() && call.sum.aligned();
  return call;
}

NormCall checked_norm_backward(const NormInputs& inputs, const NormOptions& options,
                               const NormGradients& gradients, const Context& context) {
  NormCall call = checked_inputs(Pass::backward, inputs, options, context);
  NormProblem& problem = call.problem;
  check(!inputs.residual.given(), "residual", "none in backward, where x is already the sum",
        inputs.residual);
  const BesideX beside(inputs.x, context);
  check(gradients.dy.given(), "dy", "the shape of x", gradients.dy);
  beside.rows(gradients.dy, "dy");
  beside.rows(gradients.d_sum, "d_sum");
  beside.rows(gradients.dx, "dx");
  check(gradients.rstd.given(), "rstd", "the rstd of forward", gradients.rstd);
  beside.statistics(gradients.rstd, "rstd");
  check(gradients.mean.given() == (options.norm == Norm::layer), "mean",
        options.norm == Norm::layer ? "the mean of forward" : "none with an rms norm", gradients.mean);
  beside.statistics(gradients.mean, "mean");
  check(inputs.weight.given() || !gradients.d_weight.given(), "d_weight", "a weight to differentiate",
        "no weight");
  check(inputs.bias.given() || !gradients.d_bias.given(), "d_bias", "a bias to differentiate", "no bias");
  beside.weights(gradients.d_weight, "d_weight");
  beside.weights(gradients.d_bias, "d_bias");
  if (gradients.d_weight.given()) check_dtype(gradients.d_weight, "d_weight", problem.weight_dtype);
  if (gradients.d_bias.given()) check_dtype(gradients.d_bias, "d_bias", problem.weight_dtype);

  const Tensor none;
  check_written({{"dx", &gradients.dx}, {"d_weight", &gradients.d_weight}, {"d_bias", &gradients.d_bias}},
                {{"x", &inputs.x},
                 {"weight", &inputs.weight},
                 {"bias", &inputs.bias},
                 {"dy", same_view(gradients.dy, gradients.dx) ? &none : &gradients.dy},
                 {"d_sum", same_view(gradients.d_sum, gradients.dx) ? &none : &gradients.d_sum},
                 {"rstd", &gradients.rstd},
                 {"mean", &gradients.mean}});
  check_written({{"d_weight", &gradients.d_weight}, {"d_bias", &gradients.d_bias}},
                {{"dy", &gradients.dy}, {"d_sum", &gradients.d_sum}});
  call.dy = matrix_of(gradients.dy);
  call.d_sum = matrix_of(gradients.d_sum);
  call.dx = matrix_of(gradients.dx);
  call.rstd = vector_of(gradients.rstd);
  call.mean = vector_of(gradients.mean);
  call.d_weight = vector_of(gradients.d_weight);
  call.d_bias = vector_of(gradients.d_bias);
  problem.x_gradient = gradients.dx.given();
  problem.weight_gradient = gradients.d_weight.given() || gradients.d_bias.given();
  problem.aligned = problem.aligned && call.dy.aligned() && call.d_sum.aligned() && call.dx.aligned();
  return call;
}

}  // namespace tilewise
