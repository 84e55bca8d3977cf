#include <array>
#include <string>

#include "check.h"
#include "layer.h"
#include "rows.h"

namespace tilewise::torch_binding {
namespace {

using torch::stable::detail::from;

/// The work of a pass over memory, as the number of multiply-adds that take as long.
double memory_work(const Tensor& tensor) { return 4 * static_cast<double>(tensor.size()); }

Tensor optional_index_view(const OptionalTensor& tensor, std::string_view name) {
  return tensor ? index_view(*tensor, name) : Tensor();
}

struct NormArguments {
  explicit NormArguments(ArgumentStack& stack)
      : x(stack.take<TorchTensor>()),
        residual(stack.take<OptionalTensor>()),
        weight(stack.take<OptionalTensor>()),
        bias(stack.take<OptionalTensor>()),
        epsilon(stack.take<double>()),
        layer(stack.take<bool>()),
        kernel_name(stack.take<std::string>()) {}

  TorchTensor x;
  OptionalTensor residual, weight, bias;
  double epsilon;
  bool layer;
  std::string kernel_name;

  NormInputs inputs() {
    const NormInputs result{row_view(x, "x"), row_view(residual, "residual"), row_view(weight, "weight"),
                            row_view(bias, "bias")};
    check(result.x.rank == 2, "x", "rank 2 [M, D]", result.x);
    return result;
  }
  NormOptions options() const {
    return {.norm = layer ? Norm::layer : Norm::rms,
            .epsilon = static_cast<float>(epsilon),
            .kernel = kernel_name};
  }
};

struct RopeArguments {
  explicit RopeArguments(ArgumentStack& stack)
      : q(stack.take<TorchTensor>()),
        k(stack.take<OptionalTensor>()),
        cos(stack.take<TorchTensor>()),
        sin(stack.take<TorchTensor>()),
        positions(stack.take<OptionalTensor>()),
        interleaved(stack.take<bool>()),
        inverse(stack.take<bool>()),
        kernel_name(stack.take<std::string>()) {}

  TorchTensor q;
  OptionalTensor k;
  TorchTensor cos, sin;
  OptionalTensor positions;
  bool interleaved, inverse;
  std::string kernel_name;

  RopeInputs inputs() {
    const RopeInputs result{.q = row_view(q, "q"),
                            .k = row_view(k, "k"),
                            .cos = row_view(cos, "cos"),
                            .sin = row_view(sin, "sin"),
                            .positions = optional_index_view(positions, "positions")};
    check(result.q.rank == 4, "q", "rank 4 [B, H, S, D]", result.q);
    check(!k || result.k.rank == 4, "k", "rank 4 [B, H, S, D]", result.k);
    return result;
  }
  RopeOptions options() const {
    return {.pairs = interleaved ? RopePairs::interleaved : RopePairs::halves,
            .inverse = inverse,
            .kernel = kernel_name};
  }
};

struct CacheArguments {
  explicit CacheArguments(ArgumentStack& stack)
      : q(stack.take<TorchTensor>()),
        k(stack.take<TorchTensor>()),
        v(stack.take<TorchTensor>()),
        k_cache(stack.take<TorchTensor>()),
        v_cache(stack.take<TorchTensor>()),
        cos(stack.take<TorchTensor>()),
        sin(stack.take<TorchTensor>()),
        positions(stack.take<OptionalTensor>()),
        cache_starts(stack.take<OptionalTensor>()),
        page_table(stack.take<OptionalTensor>()),
        interleaved(stack.take<bool>()),
        kernel_name(stack.take<std::string>()),
        cache_ends(stack.take<OptionalTensor>()) {}

  TorchTensor q, k, v, k_cache, v_cache, cos, sin;
  OptionalTensor positions, cache_starts, page_table;
  bool interleaved;
  std::string kernel_name;
  OptionalTensor cache_ends;

  RopeInputs inputs() {
    const RopeInputs result{.q = row_view(q, "q"),
                            .k = row_view(k, "k"),
                            .v = row_view(v, "v"),
                            .cos = row_view(cos, "cos"),
                            .sin = row_view(sin, "sin"),
                            .positions = optional_index_view(positions, "positions"),
                            .cache_starts = optional_index_view(cache_starts, "cache_starts"),
                            .page_table = optional_index_view(page_table, "page_table"),
                            .cache_ends = optional_index_view(cache_ends, "cache_ends")};
    check(result.q.rank == 4, "q", "rank 4 [B, H, S, D]", result.q);
    return result;
  }
  RopeOptions options() const {
    return {.pairs = interleaved ? RopePairs::interleaved : RopePairs::halves, .kernel = kernel_name};
  }
  RopeOutputs outputs(const Tensor& out) const {
    return {.q = out,
            .k_cache = view(k_cache, "k_cache", floating),
            .v_cache = view(v_cache, "v_cache", floating)};
  }
};

/// A view with the shape of `like` and no memory, for a call that is only checked.
Tensor placeholder_like(const Tensor& like) {
  return placeholder(std::span(like.shape).first(static_cast<std::size_t>(like.rank)), like.dtype,
                     like.device);
}

}  // namespace

void norm_forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    NormArguments arguments(taken);
    const NormInputs inputs = arguments.inputs();
    const NormOptions options = arguments.options();
    const bool layer = arguments.layer, residual = inputs.residual.given();
    const DType statistics = inputs.x.dtype == DType::f64 ? DType::f64 : DType::f32;
    const TorchTensor y = empty_like(inputs.x);
    // All results of an operator must be tensors, so those that do not exist are empty.
    const std::array none = {std::int64_t{0}};
    const std::array each = {inputs.x.extent(0)};
    const TorchTensor sum = residual ? empty_like(inputs.x) : empty(none, inputs.x.dtype, inputs.x.device);
    const TorchTensor rstd = empty(each, statistics, inputs.x.device);
    const TorchTensor mean = empty(layer ? each : none, statistics, inputs.x.device);
    const NormOutputs outputs{.y = view(y, "y", floating),
                              .sum = residual ? view(sum, "sum", floating) : Tensor(),
                              .rstd = view(rstd, "rstd", floating),
                              .mean = layer ? view(mean, "mean", floating) : Tensor()};
    Runtime runtime(inputs.x.device, memory_work(inputs.x));
    runtime.run(plan_norm_forward(inputs, options, outputs, runtime.context()));
    stack[0] = from(y);
    stack[1] = from(sum);
    stack[2] = from(rstd);
    stack[3] = from(mean);
  });
}

void check_norm_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    NormArguments arguments(taken);
    const NormInputs inputs = arguments.inputs();
    check_norm_forward(inputs, arguments.options(), {.y = placeholder_like(inputs.x)},
                       planning_context(inputs.x));
  });
}

void norm_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
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
    Runtime runtime(inputs.x.device, memory_work(inputs.x));
    runtime.run(plan_norm_backward(inputs, options, gradients, runtime.context()));
    stack[0] = from(std::move(memory.memory()));
  });
}

void rope_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    RopeArguments arguments(taken);
    const RopeInputs inputs = arguments.inputs();
    const RopeOptions options = arguments.options();
    const bool with_key = inputs.k.given();
    std::vector<TorchTensor> results = {empty_beside(inputs.q, inputs.q.extent(3))};
    if (with_key) results.push_back(empty_beside(inputs.k, inputs.k.extent(3)));
    const RopeOutputs outputs{.q = view(results[0], "q", floating),
                              .k = with_key ? view(results[1], "k", floating) : Tensor()};
    Runtime runtime(inputs.q.device, memory_work(inputs.q));
    runtime.run(plan_rope(inputs, options, outputs, runtime.context()));
    stack[0] = from(std::move(results));
  });
}

void check_rope_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    RopeArguments arguments(taken);
    const RopeInputs inputs = arguments.inputs();
    const RopeOutputs outputs{.q = placeholder_like(inputs.q),
                              .k = inputs.k.given() ? placeholder_like(inputs.k) : Tensor()};
    check_rope(inputs, arguments.options(), outputs, planning_context(inputs.q));
  });
}

void rope_into_cache_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    CacheArguments arguments(taken);
    const RopeInputs inputs = arguments.inputs();
    const RopeOptions options = arguments.options();
    const TorchTensor out = empty_beside(inputs.q, inputs.q.extent(3));
    const RopeOutputs outputs = arguments.outputs(view(out, "q", floating));
    Runtime runtime(inputs.q.device, memory_work(inputs.q));
    runtime.run(plan_rope(inputs, options, outputs, runtime.context()));
    stack[0] = from(out);
  });
}

void check_rope_into_cache_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    CacheArguments arguments(taken);
    const RopeInputs inputs = arguments.inputs();
    const RopeOutputs outputs = arguments.outputs(placeholder_like(inputs.q));
    check_rope(inputs, arguments.options(), outputs, planning_context(inputs.q));
  });
}

}  // namespace tilewise::torch_binding
