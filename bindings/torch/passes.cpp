#include <array>
#include <string>

#include "core/check.h"
#include "layer.h"
#include "norm/kernel.h"
#include "norm/validate.h"
#include "rope/kernel.h"
#include "rope/validate.h"
#include "rows.h"

namespace tilewise::torch_binding {
namespace {

using torch::stable::detail::from;

/// Work of passes over memory, in multiply-adds that take as long.
double passing_work(const Tensor& tensor) { return 4 * static_cast<double>(tensor.size()); }

}  // namespace

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
