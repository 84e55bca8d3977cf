#include <limits>

#include "fuzz/oracle.h"
#include "support/random_problem.h"

namespace tilewise::fuzz {
namespace {

using test::Buffer;
using test::Random;
using test::RandomProblem;

constexpr double most_cost = 1e4;

void add_inputs(Call& call, AttentionInputs& in) {
  call.add("q", in.q);
  call.add("k", in.k);
  call.add("v", in.v);
  call.add("mask", in.mask);
  call.add("alibi_slopes", in.alibi_slopes);
  call.add("sinks", in.sinks);
  call.add("logit_scale", in.logit_scale);
  call.add("key_lengths", in.key_lengths);
  call.add("page_table", in.page_table);
  call.add("dropout_seed", in.dropout_seed);
  call.add("packed.cumulative_q", in.packed.cumulative_q);
  call.add("packed.cumulative_k", in.packed.cumulative_k);
  call.add("blocks.counts", in.blocks.counts);
  call.add("blocks.indices", in.blocks.indices);
  call.add("blocks.full_counts", in.blocks.full_counts);
  call.add("blocks.full_indices", in.blocks.full_indices);
  call.add("blocks.tile_ids", in.blocks.tile_ids);
  call.add("blocks.tiles", in.blocks.tiles);
}

float odd_float(std::uint8_t how) {
  constexpr float values[] = {0.0f,
                              -1.0f,
                              1.0f,
                              std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::max(),
                              std::numeric_limits<float>::denorm_min(),
                              1e-30f,
                              0.999f};
  return values[how % std::size(values)];
}

std::int64_t odd_integer(std::uint8_t how) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t values[] = {0,
                                     1,
                                     -1,
                                     7,
                                     most,
                                     std::numeric_limits<std::int64_t>::min(),
                                     std::int64_t{1} << 31,
                                     (std::int64_t{1} << 31) - 1,
                                     std::int64_t{1} << 62,
                                     std::int64_t{1} << 30,
                                     most - 1,
                                     128};
  return values[how % std::size(values)];
}

void add_mistakes(Call& call, AttentionInputs& in, AttentionOptions& options) {
  call.mistakes = {
      [&](std::uint8_t how) { options.scale = odd_float(how); },
      [&](std::uint8_t how) { options.softcap = odd_float(how); },
      [&](std::uint8_t how) { options.dropout.probability = odd_float(how); },
      [&](std::uint8_t how) { options.window.left = odd_integer(how); },
      [&](std::uint8_t how) { options.window.right = odd_integer(how); },
      [&](std::uint8_t how) { options.alignment = static_cast<Alignment>(how); },
      [&](std::uint8_t how) { options.precision = static_cast<Precision>(how); },
      [&](std::uint8_t how) { options.kernel = how % 2 == 0 ? "" : "no such kernel"; },
      [&](std::uint8_t how) { in.packed.max_length_q = odd_integer(how); },
      [&](std::uint8_t how) { in.packed.max_length_k = odd_integer(how); },
      [&](std::uint8_t how) { in.blocks.block_q = odd_integer(how); },
      [&](std::uint8_t how) { in.blocks.block_k = odd_integer(how); },
  };
}

// Both passes take the same inputs.
struct Problem {
  RandomProblem drawn;
  AttentionInputs inputs;
  AttentionOptions options;
  Buffer seed;

  explicit Problem(const Input& input) {
    Random random = input.random();
    drawn = random_problem(random, input.seed(), most_cost);
    if (random.chance(0.1)) drawn = widened(drawn);  // f64
    inputs = drawn.inputs();
    options = drawn.options;
    options.precision = random.pick({Precision::standard, Precision::allow_tf32, Precision::strict});
    if (random.chance(0.2)) {
      seed = test::seed_words(options.dropout);
      inputs.dropout_seed = seed.view();
    }
    options.batch_invariant = random.chance(0.2);
  }
};

void fuzz_forward(Problem& problem, const Input& input) {
  const test::OutputBuffers buffers = make_outputs(problem.drawn);
  AttentionOutputs outputs = buffers.view(input.checks() % 8 < 4);
  AttentionInputs& in = problem.inputs;
  AttentionOptions& options = problem.options;
  Call call{.name = "attention forward", .kernel = &options.kernel};
  add_inputs(call, in);
  call.add("o", outputs.o, Use::written);
  call.add("lse", outputs.lse, Use::written);
  call.workspace = [&](const Context& c) { return attention_forward_workspace(in, options, outputs, c); };
  call.run = [&](const Context& c) { attention_forward(in, options, outputs, c); };
  call.explain = [&](const Context& c) {
    return std::vector{explain_attention_forward(in, options, outputs, c)};
  };
  add_mistakes(call, in, options);
  check_call(call, input);
}

void fuzz_backward(Problem& problem, const Input& input) {
  test::OutputBuffers outputs = make_outputs(problem.drawn);
  Random values(input.seed());
  outputs.o.fill_random(values);
  outputs.lse.fill_random(values);
  const test::GradientBuffers buffers = make_gradients(problem.drawn);
  AttentionGradients gradients{.o = outputs.o.view(),
                               .lse = outputs.lse.view(),
                               .d_o = problem.drawn.d_o.view(),
                               .d_lse = problem.drawn.d_lse.view(),
                               .dq = buffers.dq.view(),
                               .dk = buffers.dk.view(),
                               .dv = buffers.dv.view(),
                               .dmask = buffers.dmask.view(),
                               .dsinks = buffers.dsinks.view(),
                               .dlogit_scale = buffers.dlogit_scale.view()};
  AttentionInputs& in = problem.inputs;
  AttentionOptions& options = problem.options;
  Call call{.name = "attention backward", .kernel = &options.kernel};
  add_inputs(call, in);
  call.add("o", gradients.o);
  call.add("lse", gradients.lse);
  call.add("d_o", gradients.d_o);
  call.add("d_lse", gradients.d_lse);
  call.add("dq", gradients.dq, Use::written);
  call.add("dk", gradients.dk, Use::written);
  call.add("dv", gradients.dv, Use::written);
  call.add("dmask", gradients.dmask, Use::written);
  call.add("dsinks", gradients.dsinks, Use::written);
  call.add("dlogit_scale", gradients.dlogit_scale, Use::written);
  call.workspace = [&](const Context& c) { return attention_backward_workspace(in, options, gradients, c); };
  call.run = [&](const Context& c) { attention_backward(in, options, gradients, c); };
  call.explain = [&](const Context& c) {
    return std::vector{explain_attention_backward(in, options, gradients, c)};
  };
  add_mistakes(call, in, options);
  check_call(call, input);
}

}  // namespace

void fuzz_attention(std::span<const std::uint8_t> bytes) {
  const Input input(bytes);
  Problem problem(input);
  if (input.operation() % 2 == 0 || problem.drawn.layout == Layout::paged) {
    fuzz_forward(problem, input);
  } else {
    fuzz_backward(problem, input);
  }
}

}  // namespace tilewise::fuzz
