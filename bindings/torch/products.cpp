#include <array>
#include <string>

#include "check.h"
#include "layer.h"
#include "rows.h"

namespace tilewise::torch_binding {
namespace {

using torch::stable::detail::from;

/// A matrix may be row-major or column-major. Others are replaced by a row-major copy.
Tensor matrix_view(TorchTensor& matrix, std::string_view name) {
  const bool by_columns = matrix.dim() == 2 && matrix.stride(0) == 1;
  return by_columns ? view(matrix, name, floating) : row_view(matrix, name);
}
Tensor matrix_view(OptionalTensor& matrix, std::string_view name) {
  return matrix ? matrix_view(*matrix, name) : Tensor();
}

Tensor optional_view(const OptionalTensor& tensor, std::string_view name) {
  return tensor ? view(*tensor, name, floating) : Tensor();
}

Activation activation_of(std::string_view name) {
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    if (name == to_string(activation)) return activation;
  }
  reject("activation", "none, relu, gelu, gelu_tanh or silu", "'" + std::string(name) + "'");
}

Precision precision_of(bool allow_tf32) { return allow_tf32 ? Precision::allow_tf32 : Precision::standard; }

double product_work(const Tensor& a, const Tensor& b) {
  return b.rank == 2 ? static_cast<double>(a.size()) * static_cast<double>(b.extent(0)) : 0;
}

/// Allocates the product's [rows of like, rows of weight], unless the shapes are malformed: then the library
/// throws before it looks at outputs.
OptionalTensor empty_rows(const Tensor& like, const Tensor& weight) {
  if (like.rank != 2 || weight.rank != 2) return {};
  const std::array shape = {like.extent(0), weight.extent(0)};
  return empty(shape, like.dtype, like.device);
}

/// The same without memory, for a call that is only checked.
Tensor placeholder_rows(const Tensor& like, const Tensor& weight) {
  if (like.rank != 2 || weight.rank != 2) return {};
  return placeholder(std::array{like.extent(0), weight.extent(0)}, like.dtype, like.device);
}

struct GemmArguments {
  explicit GemmArguments(ArgumentStack& stack)
      : a(stack.take<TorchTensor>()),
        b(stack.take<TorchTensor>()),
        bias(stack.take<OptionalTensor>()),
        gate(stack.take<OptionalTensor>()),
        gate_bias(stack.take<OptionalTensor>()),
        residual(stack.take<OptionalTensor>()),
        activation(stack.take<std::string>()),
        kernel_name(stack.take<std::string>()),
        allow_tf32(stack.take<bool>()) {}

  TorchTensor a, b;
  OptionalTensor bias, gate, gate_bias, residual;
  std::string activation, kernel_name;
  bool allow_tf32;

  GemmInputs inputs() {
    return {.a = matrix_view(a, "a"),
            .b = matrix_view(b, "b"),
            .bias = optional_view(bias, "bias"),
            .gate = matrix_view(gate, "gate"),
            .gate_bias = optional_view(gate_bias, "gate_bias"),
            .residual = row_view(residual, "residual")};
  }
  GemmOptions options() const {
    return {.activation = activation_of(activation),
            .precision = precision_of(allow_tf32),
            .kernel = kernel_name};
  }
};

struct FfnArguments {
  explicit FfnArguments(ArgumentStack& stack)
      : x(stack.take<TorchTensor>()),
        up(stack.take<TorchTensor>()),
        down(stack.take<TorchTensor>()),
        gate(stack.take<OptionalTensor>()),
        up_bias(stack.take<OptionalTensor>()),
        gate_bias(stack.take<OptionalTensor>()),
        down_bias(stack.take<OptionalTensor>()),
        residual(stack.take<OptionalTensor>()),
        activation(stack.take<std::string>()),
        max_intermediate_bytes(stack.take<std::int64_t>()),
        kernel_name(stack.take<std::string>()),
        allow_tf32(stack.take<bool>()) {}

  TorchTensor x, up, down;
  OptionalTensor gate, up_bias, gate_bias, down_bias, residual;
  std::string activation;
  std::int64_t max_intermediate_bytes;
  std::string kernel_name;
  bool allow_tf32;

  FfnInputs inputs() {
    return {.x = row_view(x, "x"),
            .up = matrix_view(up, "up"),
            .gate = matrix_view(gate, "gate"),
            .down = matrix_view(down, "down"),
            .up_bias = optional_view(up_bias, "up_bias"),
            .gate_bias = optional_view(gate_bias, "gate_bias"),
            .down_bias = optional_view(down_bias, "down_bias"),
            .residual = row_view(residual, "residual")};
  }
  FfnOptions options() const {
    check(max_intermediate_bytes >= 0, "max_intermediate_bytes", "0 or above", max_intermediate_bytes);
    return {.activation = activation_of(activation),
            .max_intermediate_bytes = static_cast<std::size_t>(max_intermediate_bytes),
            .precision = precision_of(allow_tf32),
            .kernel = kernel_name};
  }
};

}  // namespace

void gemm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    GemmArguments arguments(taken);
    const GemmInputs inputs = arguments.inputs();
    const GemmOptions options = arguments.options();
    const OptionalTensor out = empty_rows(inputs.a, inputs.b);
    Runtime runtime(inputs.a.device, product_work(inputs.a, inputs.b));
    const GemmOutputs outputs{optional_view(out, "out")};
    runtime.run(plan_gemm(inputs, options, outputs, runtime.context()));
    stack[0] = from(*out);
  });
}

void explain_gemm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    GemmArguments arguments(taken);
    const GemmInputs inputs = arguments.inputs();
    const OptionalTensor out = empty_rows(inputs.a, inputs.b);
    const Runtime runtime(inputs.a.device, 0);
    stack[0] = from(
        to_string(explain_gemm(inputs, arguments.options(), {optional_view(out, "out")}, runtime.context())));
  });
}

void check_gemm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    GemmArguments arguments(taken);
    const GemmInputs inputs = arguments.inputs();
    check_gemm(inputs, arguments.options(), {placeholder_rows(inputs.a, inputs.b)},
               planning_context(inputs.a));
  });
}

void ffn_forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    const FfnOptions options = arguments.options();
    const OptionalTensor out = empty_rows(inputs.x, inputs.down);
    Runtime runtime(inputs.x.device, 2 * product_work(inputs.x, inputs.up));
    const FfnOutputs outputs{optional_view(out, "out")};
    runtime.run(plan_ffn_forward(inputs, options, outputs, runtime.context()));
    stack[0] = from(*out);
  });
}

// Also returns the products before the activation, which backward would otherwise compute again.
void ffn_forward_kept_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    const FfnOptions options = arguments.options();
    const OptionalTensor out = empty_rows(inputs.x, inputs.down);
    const OptionalTensor up_product = empty_rows(inputs.x, inputs.up);
    const OptionalTensor gate_product =
        inputs.gate.given() ? empty_rows(inputs.x, inputs.up) : OptionalTensor();
    Runtime runtime(inputs.x.device, 2 * product_work(inputs.x, inputs.up));
    const FfnOutputs outputs{.out = optional_view(out, "out"),
                             .up_product = optional_view(up_product, "up_product"),
                             .gate_product = optional_view(gate_product, "gate_product")};
    runtime.run(plan_ffn_forward(inputs, options, outputs, runtime.context()));
    stack[0] = from(*out);
    stack[1] = from(*up_product);
    // All results of an operator must be tensors, so one that does not exist is empty.
    const std::array none = {std::int64_t{0}};
    stack[2] = from(gate_product ? *gate_product : empty(none, inputs.x.dtype, inputs.x.device));
  });
}

void check_ffn_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    check_ffn_forward(inputs, arguments.options(), {.out = placeholder_rows(inputs.x, inputs.down)},
                      planning_context(inputs.x));
  });
}

void explain_ffn_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    const OptionalTensor out = empty_rows(inputs.x, inputs.down);
    const Runtime runtime(inputs.x.device, 0);
    stack[0] = from(to_string(
        explain_ffn_forward(inputs, arguments.options(), {optional_view(out, "out")}, runtime.context())));
  });
}

void ffn_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    TorchTensor grad_out = taken.take<TorchTensor>();
    const auto needed = taken.take<std::vector<bool>>();
    auto up_product = taken.take<OptionalTensor>(), gate_product = taken.take<OptionalTensor>();
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    const FfnOptions options = arguments.options();
    GradientMemory memory(needed);
    FfnGradients gradients{.d_out = row_view(grad_out, "d_out")};
    gradients.dx = memory.next(inputs.x, "dx");
    gradients.d_up = memory.next(inputs.up, "d_up");
    gradients.d_down = memory.next(inputs.down, "d_down");
    gradients.d_gate = memory.next(inputs.gate, "d_gate");
    gradients.d_up_bias = memory.next(inputs.up_bias, "d_up_bias");
    gradients.d_gate_bias = memory.next(inputs.gate_bias, "d_gate_bias");
    gradients.d_down_bias = memory.next(inputs.down_bias, "d_down_bias");
    gradients.up_product = row_view(up_product, "up_product");
    gradients.gate_product = row_view(gate_product, "gate_product");
    Runtime runtime(inputs.x.device, 4 * product_work(inputs.x, inputs.up));
    runtime.run(plan_ffn_backward(inputs, options, gradients, runtime.context()));
    stack[0] = from(std::move(memory.memory()));
  });
}

}  // namespace tilewise::torch_binding
