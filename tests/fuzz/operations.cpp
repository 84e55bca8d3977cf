#include <limits>

#include "fuzz/oracle.h"
#include "layer/ffn_case.h"
#include "layer/gemm_case.h"
#include "layer/norm_case.h"
#include "layer/rope_case.h"

namespace tilewise::fuzz {
namespace {

using test::Buffer;
using test::Random;

std::int64_t small_extent(Random& random) {
  if (random.chance(0.05)) return 0;
  return random.chance(0.2) ? random.between(20, 70) : random.between(1, 19);
}

DType any_floating(Random& random) { return random.pick({DType::f32, DType::f16, DType::bf16, DType::f64}); }

Activation any_activation(Random& random, bool gated) {
  if (!gated && random.chance(0.2)) return Activation::none;
  return random.pick({Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu});
}

std::size_t odd_size(std::uint8_t how) {
  constexpr std::size_t values[] = {
      1, 64, 1000, std::numeric_limits<std::size_t>::max(), std::size_t{1} << 63, std::size_t{1} << 40};
  return values[how % std::size(values)];
}

template <typename Options>
void add_kernel_mistakes(Call& call, Options& options) {
  call.kernel = &options.kernel;
  call.mistakes = {[&](std::uint8_t how) { options.kernel = how % 2 == 0 ? "" : "no such kernel"; }};
}

void fuzz_gemm(Random& random, const Input& input) {
  const bool gated = random.chance(0.4);
  const DType dtype = any_floating(random);
  const Activation activation = any_activation(random, gated);
  const test::gemm_case::Sizes sizes{small_extent(random), small_extent(random), small_extent(random)};
  test::gemm_case::Problem p = test::gemm_case::random_problem(random, sizes, dtype, activation, gated);
  p.options.precision = random.pick({Precision::standard, Precision::allow_tf32, Precision::strict});
  GemmInputs in = p.inputs();
  GemmOutputs out{p.out.view()};
  if (random.chance(0.2)) in.residual = out.out;  // in place
  GemmOptions& options = p.options;
  Call call{.name = "gemm"};
  call.add("a", in.a);
  call.add("b", in.b);
  call.add("bias", in.bias);
  call.add("gate", in.gate);
  call.add("gate_bias", in.gate_bias);
  call.add("residual", in.residual);
  call.add("out", out.out, options.accumulate ? Use::updated : Use::written);
  call.workspace = [&](const Context& c) { return gemm_workspace(in, options, out, c); };
  call.run = [&](const Context& c) { gemm(in, options, out, c); };
  call.explain = [&](const Context& c) { return std::vector{explain_gemm(in, options, out, c)}; };
  add_kernel_mistakes(call, options);
  call.mistakes.push_back([&](std::uint8_t how) { options.activation = static_cast<Activation>(how); });
  call.mistakes.push_back([&](std::uint8_t how) { options.precision = static_cast<Precision>(how); });
  check_call(call, input);
}

void add_inputs(Call& call, FfnInputs& in) {
  call.add("x", in.x);
  call.add("up", in.up);
  call.add("gate", in.gate);
  call.add("down", in.down);
  call.add("up_bias", in.up_bias);
  call.add("gate_bias", in.gate_bias);
  call.add("down_bias", in.down_bias);
}

void fuzz_ffn(Random& random, const Input& input) {
  const bool gated = random.chance(0.5), backward = random.chance(0.5);
  const DType dtype = any_floating(random);
  const Activation activation = any_activation(random, gated);
  const test::ffn_case::Sizes sizes{small_extent(random), small_extent(random), small_extent(random),
                                    small_extent(random)};
  test::ffn_case::Problem p = test::ffn_case::random_problem(random, sizes, dtype, activation, gated);
  if (random.chance(0.4)) p.keep(random);
  FfnOptions& options = p.options;
  if (random.chance(0.5)) options.max_intermediate_bytes = static_cast<std::size_t>(random.between(1, 4000));
  FfnInputs in = p.inputs();
  FfnOutputs out = p.outputs();
  FfnGradients gradients = p.gradients();
  Call call{.name = backward ? "ffn backward" : "ffn forward"};
  add_inputs(call, in);
  if (backward) {
    Random values(input.seed());
    for (Buffer* product : {&p.up_product, &p.gate_product}) {
      if (product->given()) product->fill_random(values);
    }
    in.residual = {};
    call.add("d_out", gradients.d_out);
    call.add("up_product", gradients.up_product);
    call.add("gate_product", gradients.gate_product);
    for (const auto& [name, gradient] :
         {std::pair("dx", &gradients.dx), std::pair("d_up", &gradients.d_up),
          std::pair("d_gate", &gradients.d_gate), std::pair("d_down", &gradients.d_down),
          std::pair("d_up_bias", &gradients.d_up_bias), std::pair("d_gate_bias", &gradients.d_gate_bias),
          std::pair("d_down_bias", &gradients.d_down_bias)}) {
      if (random.chance(0.2)) *gradient = {};
      call.add(name, *gradient, Use::written);
    }
    call.workspace = [&](const Context& c) { return ffn_backward_workspace(in, options, gradients, c); };
    call.run = [&](const Context& c) { ffn_backward(in, options, gradients, c); };
    call.explain = [&](const Context& c) {
      return std::vector{explain_ffn_backward(in, options, gradients, c)};
    };
  } else {
    if (random.chance(0.2)) in.residual = out.out;
    call.add("residual", in.residual);
    call.add("out", out.out, Use::written);
    call.add("up_product", out.up_product, Use::written);
    call.add("gate_product", out.gate_product, Use::written);
    call.workspace = [&](const Context& c) { return ffn_forward_workspace(in, options, out, c); };
    call.run = [&](const Context& c) { ffn_forward(in, options, out, c); };
    call.explain = [&](const Context& c) { return std::vector{explain_ffn_forward(in, options, out, c)}; };
  }
  add_kernel_mistakes(call, options);
  call.mistakes.push_back([&](std::uint8_t how) { options.activation = static_cast<Activation>(how); });
  call.mistakes.push_back([&](std::uint8_t how) { options.precision = static_cast<Precision>(how); });
  call.mistakes.push_back([&](std::uint8_t how) { options.max_intermediate_bytes = odd_size(how); });
  check_call(call, input);
}

void fuzz_norm(Random& random, const Input& input) {
  const bool backward = random.chance(0.5);
  const DType dtype = any_floating(random);
  const std::int64_t dim = random.chance(0.1) ? random.between(100, 700) : random.between(1, 70);
  const std::int64_t rows = small_extent(random);
  const Norm norm = random.pick({Norm::rms, Norm::layer});
  test::norm_case::Problem p = test::norm_case::random_problem(random, rows, dim, dtype, norm);
  NormOptions& options = p.options;
  NormInputs in = backward ? p.backward_inputs() : p.inputs();
  NormOutputs out = p.outputs();
  NormGradients gradients = p.gradients();
  Call call{.name = backward ? "norm backward" : "norm forward"};
  call.add("x", in.x);
  call.add("residual", in.residual);
  call.add("weight", in.weight);
  call.add("bias", in.bias);
  if (backward) {
    Random values(input.seed());
    for (Buffer* statistic : {&p.rstd, &p.mean, &p.sum}) {
      if (statistic->given()) statistic->fill_random(values);
    }
    if (random.chance(0.2)) gradients.dx = {};
    if (random.chance(0.2)) gradients.d_weight = {};
    if (random.chance(0.2)) gradients.dx = random.pick({gradients.dy, gradients.d_sum});  // in place
    call.add("dy", gradients.dy);
    call.add("d_sum", gradients.d_sum);
    call.add("rstd", gradients.rstd);
    call.add("mean", gradients.mean);
    call.add("dx", gradients.dx, Use::written);
    call.add("d_weight", gradients.d_weight, Use::written);
    call.add("d_bias", gradients.d_bias, Use::written);
    call.workspace = [&](const Context& c) { return norm_backward_workspace(in, options, gradients, c); };
    call.run = [&](const Context& c) { norm_backward(in, options, gradients, c); };
    call.explain = [&](const Context& c) {
      return std::vector{explain_norm_backward(in, options, gradients, c)};
    };
  } else {
    if (random.chance(0.2)) out.rstd = {};
    if (random.chance(0.3)) {  // in place
      if (in.residual.given()) {
        out.sum = random.pick({in.x, in.residual});
      } else {
        out.y = in.x;
      }
    }
    call.add("y", out.y, Use::written);
    call.add("sum", out.sum, Use::written);
    call.add("rstd", out.rstd, Use::written);
    call.add("mean", out.mean, Use::written);
    call.workspace = [&](const Context& c) { return norm_forward_workspace(in, options, out, c); };
    call.run = [&](const Context& c) { norm_forward(in, options, out, c); };
    call.explain = [&](const Context& c) { return std::vector{explain_norm_forward(in, options, out, c)}; };
  }
  add_kernel_mistakes(call, options);
  call.mistakes.push_back([&](std::uint8_t how) { options.norm = static_cast<Norm>(how); });
  call.mistakes.push_back([&](std::uint8_t how) {
    constexpr float values[] = {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity(), 1e30f};
    options.epsilon = values[how % std::size(values)];
  });
  check_call(call, input);
}

void fuzz_rope(Random& random, const Input& input) {
  const DType dtype = any_floating(random);
  const std::int64_t dim = random.between(1, 40);
  const test::rope_case::Sizes sizes{
      .batch = random.between(1, 3),
      .heads_q = random.between(1, 4),
      .heads_kv = random.between(1, 3),
      .length = random.between(1, 9),
      .dim = dim,
      .rotary = random.chance(0.5) ? dim / 2 * 2 : random.between(0, dim / 2) * 2,
      .dim_v = random.between(1, 40)};
  test::rope_case::Problem p = test::rope_case::random_problem(random, sizes, dtype);
  const bool paged = random.chance(0.5);
  if (random.chance(0.5)) test::rope_case::add_cache(p, random, sizes, paged);
  RopeOptions& options = p.options;
  RopeInputs in = p.inputs();
  RopeOutputs out = p.outputs();
  if (random.chance(0.3)) out.q = in.q;  // in place
  if (random.chance(0.3) && out.k.given()) out.k = in.k;
  if (random.chance(0.1) && !in.v.given()) in.q = out.q = {};
  Buffer ends;
  if (in.cache_starts.given() && random.chance(0.3)) {
    std::vector<double> places = p.cache_starts.values();
    for (double& place : places) place += static_cast<double>(sizes.length);
    ends = Buffer(DType::i32, p.cache_starts.shape());
    ends.set_values(places);
    in.cache_ends = ends.view();
    in.cache_starts = {};
  }
  Call call{.name = "rope", .written_pages = &in.page_table};
  call.add("q", in.q);
  call.add("k", in.k);
  call.add("v", in.v);
  call.add("cos", in.cos);
  call.add("sin", in.sin);
  call.add("positions", in.positions);
  call.add("cache_starts", in.cache_starts);
  call.add("page_table", in.page_table);
  call.add("cache_ends", in.cache_ends);
  call.add("output q", out.q, Use::written);
  call.add("output k", out.k, Use::written);
  call.add("k_cache", out.k_cache, Use::updated);
  call.add("v_cache", out.v_cache, Use::updated);
  call.workspace = [&](const Context& c) { return rope_workspace(in, options, out, c); };
  call.run = [&](const Context& c) { rope(in, options, out, c); };
  call.explain = [&](const Context& c) { return std::vector{explain_rope(in, options, out, c)}; };
  add_kernel_mistakes(call, options);
  call.mistakes.push_back([&](std::uint8_t how) { options.pairs = static_cast<RopePairs>(how); });
  check_call(call, input);
}

}  // namespace

void fuzz_operations(std::span<const std::uint8_t> bytes) {
  const Input input(bytes);
  Random random = input.random();
  switch (input.operation() % 4) {
    case 0: return fuzz_gemm(random, input);
    case 1: return fuzz_ffn(random, input);
    case 2: return fuzz_norm(random, input);
    default: return fuzz_rope(random, input);
  }
}

}  // namespace tilewise::fuzz
