#include "tilewise/plan.h"

#include "layer/layer_case.h"

namespace tilewise::test::layer_plan_test {
namespace {

using namespace layer_case;

/// Runs a plan twice in a workspace of exactly its size, and the call once: each gives the same bits.
template <typename P, typename Call>
void expect_same(const P& plan, std::size_t bytes, const Call& call, const std::vector<Buffer*>& results) {
  EXPECT_EQ(plan.workspace_bytes(), bytes);
  const auto bits = [&](const auto& body) {
    for (Buffer* result : results) result->poison();
    Context context = serial_context();
    with_workspace(bytes, [&](Workspace workspace) {
      context.workspace = workspace;
      body(context);
    });
    std::vector<std::byte> all;
    for (const Buffer* result : results) {
      const std::vector<std::byte> bytes_of = result->bytes();
      all.insert(all.end(), bytes_of.begin(), bytes_of.end());
    }
    return all;
  };
  const auto expected = bits(call);
  const auto run = [&](const Context& context) { plan.run(context); };
  EXPECT_TRUE(bits(run) == expected);
  EXPECT_TRUE(bits(run) == expected);
}

TEST(Plan, of_a_product_runs_as_the_call_does) {
  SeededRandom random(71);
  const Buffer a = random_buffer(random, DType::f32, {7, 12}), b = random_buffer(random, DType::f32, {9, 12});
  Buffer out(DType::f32, {7, 9});
  const GemmInputs inputs{.a = a.view(), .b = b.view()};
  const GemmOptions options{.activation = Activation::gelu};
  const GemmOutputs outputs{out.view()};
  const Context context = serial_context();
  const GemmPlan plan = plan_gemm(inputs, options, outputs, context);
  EXPECT_EQ(to_string(plan.explain()), to_string(explain_gemm(inputs, options, outputs, context)));
  expect_same(plan, gemm_workspace(inputs, options, outputs, context),
              [&](const Context& c) { gemm(inputs, options, outputs, c); }, {&out});
}

TEST(Plan, of_a_norm_runs_as_the_call_does) {
  SeededRandom random(72);
  const Buffer x = random_buffer(random, DType::f32, {5, 24}),
               dy = random_buffer(random, DType::f32, {5, 24});
  const Buffer weight = random_buffer(random, DType::f32, {24});
  Buffer y(DType::f32, {5, 24}), rstd(DType::f32, {5}), dx(DType::f32, {5, 24}), d_weight(DType::f32, {24});
  const NormInputs inputs{.x = x.view(), .weight = weight.view()};
  const NormOutputs outputs{.y = y.view(), .rstd = rstd.view()};
  const NormGradients gradients{
      .dy = dy.view(), .rstd = rstd.view(), .dx = dx.view(), .d_weight = d_weight.view()};
  const Context context = serial_context();
  expect_same(plan_norm_forward(inputs, {}, outputs, context),
              norm_forward_workspace(inputs, {}, outputs, context),
              [&](const Context& c) { norm_forward(inputs, {}, outputs, c); }, {&y, &rstd});
  expect_same(plan_norm_backward(inputs, {}, gradients, context),
              norm_backward_workspace(inputs, {}, gradients, context),
              [&](const Context& c) { norm_backward(inputs, {}, gradients, c); }, {&dx, &d_weight});
}

TEST(Plan, of_a_network_runs_as_the_call_does) {
  SeededRandom random(73);
  const Buffer x = random_buffer(random, DType::f32, {6, 16}),
               up = random_buffer(random, DType::f32, {20, 16});
  const Buffer down = random_buffer(random, DType::f32, {16, 20});
  const Buffer d_out = random_buffer(random, DType::f32, {6, 16});
  Buffer out(DType::f32, {6, 16}), dx(DType::f32, {6, 16}), d_up(DType::f32, {20, 16});
  const FfnInputs inputs{.x = x.view(), .up = up.view(), .down = down.view()};
  const FfnOutputs outputs{.out = out.view()};
  const FfnGradients gradients{.d_out = d_out.view(), .dx = dx.view(), .d_up = d_up.view()};
  const Context context = serial_context();
  expect_same(plan_ffn_forward(inputs, {}, outputs, context),
              ffn_forward_workspace(inputs, {}, outputs, context),
              [&](const Context& c) { ffn_forward(inputs, {}, outputs, c); }, {&out});
  expect_same(plan_ffn_backward(inputs, {}, gradients, context),
              ffn_backward_workspace(inputs, {}, gradients, context),
              [&](const Context& c) { ffn_backward(inputs, {}, gradients, c); }, {&dx, &d_up});
}

TEST(Plan, of_a_rotary_embedding_reads_positions_when_it_runs) {
  SeededRandom random(74);
  const Buffer q = random_buffer(random, DType::f32, {1, 2, 3, 8});
  const Buffer cos = random_buffer(random, DType::f32, {10, 4}),
               sin = random_buffer(random, DType::f32, {10, 4});
  Buffer positions(DType::i32, {1, 3}), out(DType::f32, {1, 2, 3, 8});
  const RopeInputs inputs{.q = q.view(), .cos = cos.view(), .sin = sin.view(), .positions = positions.view()};
  const RopeOutputs outputs{.q = out.view()};
  const Context context = serial_context();
  positions.fill(-1);  // not looked at by the plan
  const RopePlan plan = plan_rope(inputs, {}, outputs, context);
  EXPECT_EQ(thrown<InvalidArgument>([&] { plan.run(context); }),
            "positions: expected positions from 0 to 9, got -1");
  for (const double first : {0.0, 7.0}) {
    positions.set_values(std::vector{first, first + 1, first + 2});
    expect_same(plan, rope_workspace(inputs, {}, outputs, context),
                [&](const Context& c) { rope(inputs, {}, outputs, c); }, {&out});
  }
}

/// A check takes what the call takes and computes nothing; what it refuses, it refuses in the call's words.
template <typename Inputs, typename Outputs, typename Check, typename Call>
void expect_check_of(const Check& check, const Call& call, const Inputs& sound, const Inputs& wrong,
                     const Outputs& outputs, const std::vector<Buffer*>& results) {
  const Context context = serial_context();
  for (Buffer* result : results) result->poison();
  std::vector<std::vector<std::byte>> before, after;
  for (const Buffer* result : results) before.push_back(result->bytes());
  EXPECT_NO_THROW(check(sound, {}, outputs, context));
  const std::string said = thrown<InvalidArgument>([&] { check(wrong, {}, outputs, context); });
  EXPECT_EQ(said, thrown<InvalidArgument>([&] { call(wrong, {}, outputs, context); }));
  EXPECT_FALSE(said.empty());
  for (const Buffer* result : results) after.push_back(result->bytes());
  EXPECT_EQ(before, after);
}

TEST(Checks, alone_take_and_refuse_what_the_calls_do) {
  SeededRandom random(78);
  const Buffer x = random_buffer(random, DType::f32, {6, 16}), y = random_buffer(random, DType::f32, {6, 15});
  const Buffer weight = random_buffer(random, DType::f32, {16});
  const Buffer up = random_buffer(random, DType::f32, {20, 16}),
               down = random_buffer(random, DType::f32, {16, 20});
  Buffer product(DType::f32, {6, 20}), out(DType::f32, {6, 16});
  expect_check_of<GemmInputs, GemmOutputs>(check_gemm, gemm, {.a = x.view(), .b = up.view()},
                                           {.a = y.view(), .b = up.view()}, {product.view()}, {&product});
  expect_check_of<NormInputs, NormOutputs>(
      check_norm_forward, norm_forward, {.x = x.view(), .weight = weight.view()},
      {.x = y.view(), .weight = weight.view()}, {.y = out.view()}, {&out});
  expect_check_of<FfnInputs, FfnOutputs>(
      check_ffn_forward, ffn_forward, {.x = x.view(), .up = up.view(), .down = down.view()},
      {.x = y.view(), .up = up.view(), .down = down.view()}, {.out = out.view()}, {&out});
  const Buffer q = random_buffer(random, DType::f32, {1, 2, 3, 8});
  const Buffer cos = random_buffer(random, DType::f32, {10, 4}),
               sin = random_buffer(random, DType::f32, {10, 3});
  Buffer turned(DType::f32, {1, 2, 3, 8});
  expect_check_of<RopeInputs, RopeOutputs>(
      check_rope, rope, {.q = q.view(), .cos = cos.view(), .sin = cos.view()},
      {.q = q.view(), .cos = cos.view(), .sin = sin.view()}, {.q = turned.view()}, {&turned});
}

// The operations of a layer are planned first, and what index tensors hold is looked at before the first of
// them runs: the rotary embedding would have written the cache before attention saw the lengths.
TEST(Layer, bad_key_lengths_leave_the_cache_as_it_was) {
  SeededRandom random(75);
  const Layer layer = random_layer(random, small_config("llama-2-70b"), DType::f32);
  const Buffer x = random_buffer(random, DType::f32, {1, 3, 48});
  Buffer out(DType::f32, {1, 3, 48}), k_cache(DType::f32, {1, 2, 16, 8}), v_cache(DType::f32, {1, 2, 16, 8});
  Buffer starts(DType::i32, {1}), lengths(DType::i32, {1});
  starts.fill(0);
  lengths.fill(3);
  LayerInputs inputs = layer.inputs(x);
  inputs.k_cache = k_cache.view();
  inputs.v_cache = v_cache.view();
  inputs.cache_starts = starts.view();
  inputs.key_lengths = lengths.view();
  const LayerOutputs outputs{out.view()};
  Context context = serial_context();
  with_workspace(
      layer_workspace(layer.config, layer.weights(), inputs, {}, outputs, context), [&](Workspace workspace) {
        context.workspace = workspace;
        lengths.fill(17);
        const auto before = std::vector{k_cache.bytes(), v_cache.bytes(), out.bytes()};
        EXPECT_EQ(thrown<InvalidArgument>(
                      [&] { layer_forward(layer.config, layer.weights(), inputs, {}, outputs, context); }),
                  "key_lengths: expected lengths from 0 to 16, got 17 at index 0");
        EXPECT_TRUE((before == std::vector{k_cache.bytes(), v_cache.bytes(), out.bytes()}));
      });
}

TEST(Layer, names_the_workspace_it_lacks) {
  SeededRandom random(76);
  const Layer layer = random_layer(random, small_config("llama-2-70b"), DType::f32);
  const Buffer x = random_buffer(random, DType::f32, {1, 3, 48});
  Buffer out(DType::f32, {1, 3, 48});
  const LayerOutputs outputs{out.view()};
  Context context = serial_context();
  const std::size_t needed =
      layer_workspace(layer.config, layer.weights(), layer.inputs(x), {}, outputs, context);
  const std::string expected = "workspace: expected at least " + std::to_string(needed) + " bytes, got ";
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{64}, needed - 1}) {
    std::vector<std::byte> memory(bytes);
    context.workspace = {bytes == 0 ? nullptr : memory.data(), bytes};
    EXPECT_EQ(thrown<InvalidArgument>([&] {
                layer_forward(layer.config, layer.weights(), layer.inputs(x), {}, outputs, context);
              }),
              expected + (bytes == 0 ? "none" : std::to_string(bytes) + " bytes"));
  }
}

}  // namespace
}  // namespace tilewise::test::layer_plan_test
