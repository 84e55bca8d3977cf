#include "layer.h"

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "core/check.h"
#include "ffn/kernel.h"
#include "ffn/validate.h"
#include "gemm/kernel.h"
#include "gemm/validate.h"
#include "kinds.h"
#include "norm/kernel.h"
#include "norm/validate.h"
#include "rope/kernel.h"
#include "rope/validate.h"

namespace tilewise::torch_binding {
namespace {

using OptionalTensor = std::optional<TorchTensor>;
using torch::stable::detail::from;

/// Rows with a contiguous last dimension: others are replaced by a copy.
Tensor row_view(TorchTensor& rows, std::string_view name) {
  rows = with_contiguous_last(rows);
  return view(rows, name, floating);
}
Tensor row_view(OptionalTensor& rows, std::string_view name) {
  return rows ? row_view(*rows, name) : Tensor();
}

/// Matrices may lie by rows or by columns.
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

Precision precision_of(bool allow_tf32) { return allow_tf32 ? Precision::allow_tf32 : Precision::full; }

/// Runs a checked call by the kernel of that name.
template <typename K>
void run(std::span<const K> kernels, const typename K::Call& call, std::string_view name, Runtime& runtime) {
  const K& kernel = choose_kernel(kernels, call.problem, name);
  kernel.launch(call, runtime.with_workspace(kernel.workspace(call, runtime.context())));
}

/// Work of passes over memory, in multiply-adds that take as long.
double passing_work(const Tensor& tensor) { return 4 * static_cast<double>(tensor.size()); }

double product_work(const Tensor& a, const Tensor& b) {
  return b.rank == 2 ? static_cast<double>(a.size()) * static_cast<double>(b.extent(0)) : 0;
}

/// Memory for [rows of like, columns], or none where shapes are malformed: the library names the error before
/// it looks at outputs.
OptionalTensor empty_rows(const Tensor& like, const Tensor& weight) {
  if (like.rank != 2 || weight.rank != 2) return {};
  const std::array shape = {like.extent(0), weight.extent(0)};
  return empty(shape, like.dtype, like.device);
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

/// The gradients asked for, in order; the others are not given.
class GradientMemory {
 public:
  explicit GradientMemory(const std::vector<bool>& needed) : needed_(needed) {}

  Tensor next(const Tensor& like, std::string_view name) {
    const std::size_t index = next_++;
    if (index >= needed_.size() || !needed_[index] || !like.given()) return {};
    memory_.push_back(empty_like(like));
    return view(memory_.back(), name, floating);
  }
  std::vector<TorchTensor>& memory() { return memory_; }

 private:
  const std::vector<bool>& needed_;
  std::size_t next_ = 0;
  std::vector<TorchTensor> memory_;
};

}  // namespace

void gemm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    GemmArguments arguments(taken);
    const GemmInputs inputs = arguments.inputs();
    const GemmOptions options = arguments.options();
    const OptionalTensor out = empty_rows(inputs.a, inputs.b);
    Runtime runtime(inputs.a.device, product_work(inputs.a, inputs.b));
    const GemmOutputs outputs{optional_view(out, "out")};
    run(gemm_kernel_list(), checked_gemm(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(*out);
  });
}

void explain_gemm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    GemmArguments arguments(taken);
    const GemmInputs inputs = arguments.inputs();
    const OptionalTensor out = empty_rows(inputs.a, inputs.b);
    const Runtime runtime(inputs.a.device, 0);
    stack[0] = from(
        to_string(explain_gemm(inputs, arguments.options(), {optional_view(out, "out")}, runtime.context())));
  });
}

void ffn_forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    FfnArguments arguments(taken);
    const FfnInputs inputs = arguments.inputs();
    const FfnOptions options = arguments.options();
    const OptionalTensor out = empty_rows(inputs.x, inputs.down);
    Runtime runtime(inputs.x.device, 2 * product_work(inputs.x, inputs.up));
    const FfnOutputs outputs{optional_view(out, "out")};
    run(ffn_kernel_list(), checked_ffn_forward(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(*out);
  });
}

// With the products before the activation, which backward would compute anew.
void ffn_forward_kept_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
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
    run(ffn_kernel_list(), checked_ffn_forward(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(*out);
    stack[1] = from(*up_product);
    // What there is none of is empty: an operator's results are all tensors.
    const std::array none = {std::int64_t{0}};
    stack[2] = from(gate_product ? *gate_product : empty(none, inputs.x.dtype, inputs.x.device));
  });
}

void explain_ffn_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
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
  with_kinds([&] {
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
    run(ffn_kernel_list(), checked_ffn_backward(inputs, options, gradients, runtime.context()),
        options.kernel, runtime);
    stack[0] = from(std::move(memory.memory()));
  });
}

void norm_forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    auto x = taken.take<TorchTensor>();
    auto residual = taken.take<OptionalTensor>();
    auto weight = taken.take<OptionalTensor>();
    auto bias = taken.take<OptionalTensor>();
    const auto epsilon = taken.take<double>();
    const bool layer = taken.take<bool>();
    const auto kernel_name = taken.take<std::string>();
    const NormInputs inputs{row_view(x, "x"), row_view(residual, "residual"), row_view(weight, "weight"),
                            row_view(bias, "bias")};
    const NormOptions options{.norm = layer ? Norm::layer : Norm::rms,
                              .epsilon = static_cast<float>(epsilon),
                              .kernel = kernel_name};
    check(inputs.x.rank == 2, "x", "rank 2 [M, D]", inputs.x);
    const std::int64_t rows = inputs.x.extent(0);
    const DType statistics = inputs.x.dtype == DType::f64 ? DType::f64 : DType::f32;
    const TorchTensor y = empty_like(inputs.x);
    // What there is none of is empty: an operator's results are all tensors.
    const std::array none = {std::int64_t{0}};
    const std::array each = {rows};
    const TorchTensor sum = residual ? empty_like(inputs.x) : empty(none, inputs.x.dtype, inputs.x.device);
    const TorchTensor rstd = empty(each, statistics, inputs.x.device);
    const TorchTensor mean = empty(layer ? each : none, statistics, inputs.x.device);
    const NormOutputs outputs{.y = view(y, "y", floating),
                              .sum = residual ? view(sum, "sum", floating) : Tensor(),
                              .rstd = view(rstd, "rstd", floating),
                              .mean = layer ? view(mean, "mean", floating) : Tensor()};
    Runtime runtime(inputs.x.device, passing_work(inputs.x));
    run(norm_kernel_list(), checked_norm_forward(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(y);
    stack[1] = from(sum);
    stack[2] = from(rstd);
    stack[3] = from(mean);
  });
}

void norm_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    auto grad_y = taken.take<TorchTensor>();
    auto grad_sum = taken.take<OptionalTensor>();
    auto x = taken.take<TorchTensor>();
    auto weight = taken.take<OptionalTensor>();
    auto bias = taken.take<OptionalTensor>();
    const auto rstd = taken.take<TorchTensor>();
    const auto mean = taken.take<TorchTensor>();
    const auto needed = taken.take<std::vector<bool>>();
    const bool layer = taken.take<bool>();
    const auto kernel_name = taken.take<std::string>();
    const NormInputs inputs{row_view(x, "x"), {}, row_view(weight, "weight"), row_view(bias, "bias")};
    const NormOptions options{.norm = layer ? Norm::layer : Norm::rms, .kernel = kernel_name};
    GradientMemory memory(needed);
    NormGradients gradients{.dy = row_view(grad_y, "dy"),
                            .d_sum = row_view(grad_sum, "d_sum"),
                            .rstd = view(rstd, "rstd", floating),
                            .mean = layer ? view(mean, "mean", floating) : Tensor()};
    gradients.dx = memory.next(inputs.x, "dx");
    gradients.d_weight = memory.next(inputs.weight, "d_weight");
    gradients.d_bias = memory.next(inputs.bias, "d_bias");
    Runtime runtime(inputs.x.device, passing_work(inputs.x));
    run(norm_kernel_list(), checked_norm_backward(inputs, options, gradients, runtime.context()),
        options.kernel, runtime);
    stack[0] = from(std::move(memory.memory()));
  });
}

void rope_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    auto q = taken.take<TorchTensor>();
    auto k = taken.take<OptionalTensor>();
    auto cos = taken.take<TorchTensor>();
    auto sin = taken.take<TorchTensor>();
    const auto positions = taken.take<OptionalTensor>();
    const bool interleaved = taken.take<bool>();
    const bool inverse = taken.take<bool>();
    const auto kernel_name = taken.take<std::string>();
    const RopeInputs inputs{.q = row_view(q, "q"),
                            .k = row_view(k, "k"),
                            .cos = row_view(cos, "cos"),
                            .sin = row_view(sin, "sin"),
                            .positions = positions ? index_view(*positions, "positions") : Tensor()};
    const RopeOptions options{.pairs = interleaved ? RopePairs::interleaved : RopePairs::halves,
                              .inverse = inverse,
                              .kernel = kernel_name};
    check(inputs.q.rank == 4, "q", "rank 4 [B, H, S, D]", inputs.q);
    check(!k || inputs.k.rank == 4, "k", "rank 4 [B, H, S, D]", inputs.k);
    std::vector<TorchTensor> results = {empty_beside(inputs.q, inputs.q.extent(3))};
    if (k) results.push_back(empty_beside(inputs.k, inputs.k.extent(3)));
    const RopeOutputs outputs{.q = view(results[0], "q", floating),
                              .k = k ? view(results[1], "k", floating) : Tensor()};
    Runtime runtime(inputs.q.device, passing_work(inputs.q));
    run(rope_kernel_list(), checked_rope(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(std::move(results));
  });
}

void rope_into_cache_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_kinds([&] {
    ArgumentStack taken(stack);
    auto q = taken.take<TorchTensor>();
    auto k = taken.take<TorchTensor>();
    auto v = taken.take<TorchTensor>();
    const auto k_cache = taken.take<TorchTensor>();
    const auto v_cache = taken.take<TorchTensor>();
    auto cos = taken.take<TorchTensor>();
    auto sin = taken.take<TorchTensor>();
    const auto positions = taken.take<OptionalTensor>();
    const auto cache_starts = taken.take<OptionalTensor>();
    const auto page_table = taken.take<OptionalTensor>();
    const bool interleaved = taken.take<bool>();
    const auto kernel_name = taken.take<std::string>();
    const auto cache_ends = taken.take<OptionalTensor>();
    const RopeInputs inputs{
        .q = row_view(q, "q"),
        .k = row_view(k, "k"),
        .v = row_view(v, "v"),
        .cos = row_view(cos, "cos"),
        .sin = row_view(sin, "sin"),
        .positions = positions ? index_view(*positions, "positions") : Tensor(),
        .cache_starts = cache_starts ? index_view(*cache_starts, "cache_starts") : Tensor(),
        .page_table = page_table ? index_view(*page_table, "page_table") : Tensor(),
        .cache_ends = cache_ends ? index_view(*cache_ends, "cache_ends") : Tensor()};
    const RopeOptions options{.pairs = interleaved ? RopePairs::interleaved : RopePairs::halves,
                              .kernel = kernel_name};
    check(inputs.q.rank == 4, "q", "rank 4 [B, H, S, D]", inputs.q);
    const TorchTensor out = empty_beside(inputs.q, inputs.q.extent(3));
    const RopeOutputs outputs{.q = view(out, "q", floating),
                              .k_cache = view(k_cache, "k_cache", floating),
                              .v_cache = view(v_cache, "v_cache", floating)};
    Runtime runtime(inputs.q.device, passing_work(inputs.q));
    run(rope_kernel_list(), checked_rope(inputs, options, outputs, runtime.context()), options.kernel,
        runtime);
    stack[0] = from(out);
  });
}

}  // namespace tilewise::torch_binding
