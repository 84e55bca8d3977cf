#include "gemm/validate.h"

#include "gemm/checks.h"
#include "gemm/kernel.h"

namespace tilewise {
GemmCall checked_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                      const Context& context) {
  check_kernel_name(gemm_kernel_list(), options.kernel);
  check_context(context);
  check_activation(options.activation);
  check_precision(options.precision);
  const Tensor& a = inputs.a;
  check(a.rank == 2, "a", "rank 2 [M, K]", a);
  check(is_floating(a.dtype), "a", "f32, f16, bf16 or f64", to_string(a.dtype));
  check_matrix(a, "a", a.dtype, context);
  const std::int64_t m = a.extent(0), k = a.extent(1);
  check(
      inputs.b.rank == 2 && inputs.b.extent(1) == k, "b",
      [&] { return "rank 2 [N, K] with K " + std::to_string(k); }, inputs.b);
  const std::int64_t n = inputs.b.extent(0);
  check_matrix(inputs.b, "b", a.dtype, context);
  if (inputs.gate.given()) {
    check_shape(inputs.gate, "gate", {n, k}, "the shape of b", context);
    check_matrix(inputs.gate, "gate", a.dtype, context);
    check(options.activation != Activation::none, "activation", "an activation for the gate", "none");
  }
  check_bias(inputs.bias, "bias", n, a.dtype, context);
  check(inputs.gate.given() || !inputs.gate_bias.given(), "gate_bias", "a gate to add it to", "no gate");
  check_bias(inputs.gate_bias, "gate_bias", n, a.dtype, context);
  const Tensor& out = outputs.out;
  check_shape(out, "out", {m, n}, "[M, N]", context);
  check(
      out.dtype == a.dtype || out.dtype == DType::f32, "out",
      [&] { return "f32 or the type of a, " + std::string(to_string(a.dtype)); }, to_string(out.dtype));
  check_contiguous_last(out, "out");
  if (inputs.residual.given()) {
    check_shape(inputs.residual, "residual", {m, n}, "[M, N]", context);
    check_dtype(inputs.residual, "residual", out.dtype);
    check_contiguous_last(inputs.residual, "residual");
  }
  const bool in_place = same_view(inputs.residual, out);
  const Tensor none;
  check_written({{"out", &out}}, {{"a", &a},
                                  {"b", &inputs.b},
                                  {"bias", &inputs.bias},
                                  {"gate", &inputs.gate},
                                  {"gate_bias", &inputs.gate_bias},
                                  {"residual", in_place ? &none : &inputs.residual}});

  GemmCall call{.problem = {},
                .a = matrix_of(a),
                .b = matrix_of(inputs.b),
                .gate = matrix_of(inputs.gate),
                .out = matrix_of(out),
                .residual = matrix_of(inputs.residual),
                .bias = vector_of(inputs.bias),
                .gate_bias = vector_of(inputs.gate_bias)};
  if (inputs.gate.given()) check_same_layout(call.gate, "gate", call.b, "b");
  call.problem = {.device = context.device,
                  .dtype = a.dtype,
                  .out_dtype = out.dtype,
                  .m = m,
                  .n = n,
                  .k = k,
                  .a_by_rows = call.a.by_rows(),
                  .b_by_rows = call.b.by_rows(),
                  .activation = options.activation,
                  .gated = inputs.gate.given(),
                  .bias = inputs.bias.given() || inputs.gate_bias.given(),
                  .residual = inputs.residual.given(),
                  .accumulate = options.accumulate,
                  .allow_tf32 = options.precision == Precision::allow_tf32,
                  .aligned = call.a.aligned() && call.b.aligned() && call.gate.aligned() &&
                             call.out.aligned() && call.residual.aligned(),
                  .as_blas = fits_blas(call.a, call.b, call.out, call.residual, call.bias)};
  return call;
}

}  // namespace tilewise
