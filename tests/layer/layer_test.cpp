#include <cmath>
#include <numeric>

#include "layer/layer_case.h"

namespace tilewise::test::layer_test {
namespace {

using namespace layer_case;

TEST(Layer, every_configuration_is_near_the_truth) {
  for_every_layer([](std::string_view name, DType dtype) {
    SeededRandom random(17);
    check_forward(random, name, dtype, random_context(random));
  });
}

TEST(Layer, a_cache_gives_what_the_whole_gives) {
  for (const bool paged : {false, true}) {
    SeededRandom random(18);
    const Layer layer = random_layer(random, small_config("llama-2-70b"), DType::f32);
    const Buffer x = random_buffer(random, DType::f32, {1, 11, 48});
    Buffer whole(DType::f32, {1, 11, 48});
    run(layer, layer.inputs(x), whole);

    Buffer k_cache(DType::f32, paged ? Shape{5, 2, 4, 8} : Shape{1, 2, 16, 8});
    Buffer v_cache(DType::f32, k_cache.shape());
    k_cache.fill(0);
    v_cache.fill(0);
    Buffer table(DType::i32, {1, 4});
    table.set_values(std::vector<double>{3, 0, 4, 1});
    Buffer starts(DType::i32, {1}), lengths(DType::i32, {1});
    std::int64_t first = 0;
    for (const std::int64_t count : {6, 1, 4}) {
      Buffer part(DType::f32, {1, count, 48}), out(DType::f32, {1, count, 48});
      Buffer at(DType::i64, {1, count});
      for (std::int64_t s = 0; s < count; ++s) {
        at.set({0, s}, static_cast<double>(first + s));
        for (std::int64_t e = 0; e < 48; ++e) part.set({0, s, e}, x.at(0, first + s, e));
      }
      starts.fill(static_cast<double>(first));
      lengths.fill(static_cast<double>(first + count));
      LayerInputs inputs = layer.inputs(part);
      inputs.positions = at.view();
      inputs.k_cache = k_cache.view();
      inputs.v_cache = v_cache.view();
      inputs.cache_starts = starts.view();
      inputs.key_lengths = lengths.view();
      if (paged) inputs.page_table = table.view();
      run(layer, inputs, out);
      for (std::int64_t s = 0; s < count; ++s) {
        for (std::int64_t e = 0; e < 48; ++e) {
          EXPECT_NEAR(out.at(0, s, e), whole.at(0, first + s, e), 1e-5) << "token " << first + s;
        }
      }
      first += count;
    }
  }
}

TEST(Layer, a_cache_works_without_a_rotary_embedding) {
  SeededRandom random(19);
  const Layer layer = random_layer(random, small_config("bert-base"), DType::f32);
  const Buffer x = random_buffer(random, DType::f32, {2, 5, 48});
  Buffer whole(DType::f32, {2, 5, 48}), out(DType::f32, {2, 5, 48});
  run(layer, layer.inputs(x), whole);
  Buffer k_cache(DType::f32, {2, 6, 9, 8}), v_cache(DType::f32, {2, 6, 9, 8}), lengths(DType::i32, {2});
  lengths.fill(5);
  LayerInputs inputs = layer.inputs(x);
  inputs.k_cache = k_cache.view();
  inputs.v_cache = v_cache.view();
  inputs.key_lengths = lengths.view();
  run(layer, inputs, out);
  EXPECT_LT(largest_difference(out, whole), 1e-5);

  const Buffer mask(DType::boolean, {5, 5});
  inputs.mask = mask.view();
  const std::vector<std::byte> before = out.bytes();
  EXPECT_EQ(thrown<InvalidArgument>([&] { run(layer, inputs, out); }),
            "mask: expected none with a cache, got boolean[5, 5]");
  EXPECT_EQ(before, out.bytes());
}

TEST(Layer, every_operation_is_explained) {
  SeededRandom random(20);
  const Layer layer = random_layer(random, small_config("llama-2-7b"), DType::f32);
  const Buffer x = random_buffer(random, DType::f32, {1, 3, 48});
  const Buffer out(DType::f32, {1, 3, 48});
  const std::vector<Explanation> steps =
      explain_layer(layer.config, layer.weights(), layer.inputs(x), {}, {out.view()}, serial_context());
  // norm, q, k, v, rope, attention, out, norm, ffn
  ASSERT_EQ(steps.size(), 9u);
  EXPECT_EQ(steps[4].problem.rfind("rope f32", 0), 0u) << steps[4].problem;
  EXPECT_EQ(steps[8].problem.rfind("ffn forward f32", 0), 0u) << steps[8].problem;
}

/// Tensors one behind the other in `memory`, which they are copied into.
void lay_together(Buffer& memory, std::initializer_list<Tensor*> tensors, std::span<const Buffer> from) {
  std::vector<double> values;
  auto* data = static_cast<std::byte*>(memory.view().data);
  std::size_t index = 0;
  for (Tensor* tensor : tensors) {
    const Buffer& part = from[2 * index++];  // weights and biases take turns
    const std::vector<double> more = part.values();
    values.insert(values.end(), more.begin(), more.end());
    *tensor = Tensor(data, part.dtype(), part.shape());
    data += part.size() * static_cast<std::int64_t>(size_of(part.dtype()));
  }
  memory.set_values(values);
}

TEST(Layer, projections_that_lie_together_are_one_product) {
  for (const std::string_view name : {"llama-2-70b", "bert-base"}) {
    SeededRandom random(21);
    const Layer layer = random_layer(random, small_config(name), DType::f32);
    const Buffer x = random_buffer(random, DType::f32, {2, 7, 48});
    Buffer apart(DType::f32, {2, 7, 48}), together(DType::f32, {2, 7, 48});
    run(layer, layer.inputs(x), apart);
    const std::int64_t width = (layer.config.heads_q + 2 * layer.config.heads_kv) * 8;
    Buffer memory(DType::f32, {width, 48}), bias_memory(DType::f32, {width});
    LayerWeights weights = layer.weights();
    const std::span<const Buffer> parts(layer.memory);
    lay_together(memory, {&weights.q, &weights.k, &weights.v}, parts);
    if (weights.q_bias.given()) {
      lay_together(bias_memory, {&weights.q_bias, &weights.k_bias, &weights.v_bias}, parts.subspan(1));
    }
    Context context = serial_context();
    const LayerInputs inputs = layer.inputs(x);
    const LayerOutputs outputs{together.view()};
    with_workspace(layer_workspace(layer.config, weights, inputs, {}, outputs, context),
                   [&](Workspace workspace) {
                     context.workspace = workspace;
                     layer_forward(layer.config, weights, inputs, {}, outputs, context);
                   });
    EXPECT_LT(largest_difference(apart, together), 1e-5) << name;
    const auto steps = [&](const LayerWeights& of) {
      return explain_layer(layer.config, of, inputs, {}, outputs, serial_context()).size();
    };
    EXPECT_EQ(steps(weights) + 2, steps(layer.weights())) << name;
  }
}

TEST(Layer, names_are_known) {
  EXPECT_EQ(layer_config("llama-2-7b").ffn_dim, 11008);
  EXPECT_EQ(layer_config("llama-2-70b").heads_kv, 8);
  EXPECT_EQ(layer_config("llama-3-8b").head_dim, 128);
  EXPECT_EQ(thrown<InvalidArgument>([] { layer_config("gpt"); }).rfind("name: expected one of vit-b/16", 0),
            0u);
}

TEST(Layer, bad_input_is_named_and_nothing_is_written) {
  struct Mistake {
    std::string_view text;
    void (*make)(LayerConfig&, LayerWeights&, LayerInputs&);
  };
  const Mistake mistakes[] = {
      {"config.heads_kv: expected a divisor of heads_q 6, got 4",
       [](LayerConfig& c, LayerWeights&, LayerInputs&) { c.heads_kv = 4; }},
      {"x: expected rank 3 [B, S, E] with E 48, got f32[2, 3, 47]",
       [](LayerConfig&, LayerWeights&, LayerInputs& i) { i.x.shape[2] = 47; }},
      {"x: expected a row-major tensor, got other strides",
       [](LayerConfig&, LayerWeights&, LayerInputs& i) { i.x.strides[0] += 48; }},
      {"weights.k: expected [out, in] = [48, 48], got f32[47, 48]",
       [](LayerConfig&, LayerWeights& w, LayerInputs&) { w.k.shape[0] = 47; }},
      {"weights.gate: expected [out, in] = [70, 48], got none",
       [](LayerConfig&, LayerWeights& w, LayerInputs&) { w.gate = {}; }},
      {"weights.up: expected f32, got bf16",
       [](LayerConfig&, LayerWeights& w, LayerInputs&) { w.up.dtype = DType::bf16; }},
      {"cos: expected tables of the rotary embedding, got none",
       [](LayerConfig&, LayerWeights&, LayerInputs& i) { i.cos = {}; }},
      {"cos: expected a table of at least 3 positions, got f32[2, 4]",
       [](LayerConfig&, LayerWeights&, LayerInputs& i) { i.cos.shape[0] = i.sin.shape[0] = 2; }},
      {"key_lengths: expected none without a cache, got f32[2, 3, 48]",
       [](LayerConfig&, LayerWeights&, LayerInputs& i) { i.key_lengths = i.x; }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(21);
    Layer layer = random_layer(random, small_config("llama-2-7b"), DType::f32);
    const Buffer x = random_buffer(random, DType::f32, {2, 3, 48});
    const Buffer out(DType::f32, {2, 3, 48});
    LayerWeights weights = layer.weights();
    LayerInputs inputs = layer.inputs(x);
    mistake.make(layer.config, weights, inputs);
    const std::vector<std::byte> before = out.bytes();
    EXPECT_EQ(thrown<InvalidArgument>(
                  [&] { layer_forward(layer.config, weights, inputs, {}, {out.view()}, serial_context()); }),
              mistake.text);
    EXPECT_EQ(before, out.bytes());
  }
}

TEST(LayerBackward, is_the_slope_of_forward) {
  for (const std::string_view name : layer_configs()) {
    SeededRandom random(23);
    Layer layer = random_layer(random, small_config(name), DType::f64);
    Buffer x = random_buffer(random, DType::f64, {2, 7, 48});
    Buffer mask = mask_for(random, name, DType::f64);
    const Buffer d_out = random_buffer(random, DType::f64, {2, 7, 48});
    Gradients gradients(layer, d_out, mask);
    LayerInputs inputs = layer.inputs(x);
    inputs.mask = mask.view();
    differentiate(layer, inputs, gradients.views());

    const auto loss = [&] {
      Buffer out(DType::f64, {2, 7, 48});
      run(layer, inputs, out);
      const std::vector<double> values = out.values(), factors = d_out.values();
      return std::inner_product(values.begin(), values.end(), factors.begin(), 0.0);
    };
    // Along a random direction in each tensor.
    const auto check = [&](Buffer& at, const Buffer& gradient, std::size_t index) {
      const std::vector<double> before = at.values(), slopes = gradient.values();
      std::vector<double> direction(before.size());
      for (double& value : direction) value = random.normal();
      const double predicted = std::inner_product(direction.begin(), direction.end(), slopes.begin(), 0.0);
      const auto loss_at = [&](double step) {
        std::vector<double> moved = before;
        for (std::size_t n = 0; n < moved.size(); ++n) moved[n] += step * direction[n];
        at.set_values(moved);
        const double value = loss();
        at.set_values(before);
        return value;
      };
      constexpr double step = 1e-5;
      const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
      EXPECT_NEAR(predicted, slope, 1e-5 * (1 + std::abs(slope))) << name << " tensor " << index;
    };
    check(x, gradients.dx, 0);
    for (std::size_t n = 0; n < layer.memory.size(); ++n) {
      if (layer.memory[n].given()) check(layer.memory[n], gradients.weights[n], n + 1);
    }
    if (mask.given()) check(mask, gradients.dmask, 100);
  }
}

TEST(LayerBackward, is_near_the_truth_in_every_configuration) {
  for_every_layer([](std::string_view name, DType dtype) {
    SeededRandom random(24);
    check_backward(random, name, dtype, random_context(random));
  });
}

TEST(LayerBackward, writes_only_what_is_given) {
  for (const std::string_view name : {"llama-2-70b", "bert-base"}) {
    SeededRandom random(25);
    const Layer layer = random_layer(random, small_config(name), DType::f32);
    const Buffer x = random_buffer(random, DType::f32, {2, 7, 48});
    const Buffer d_out = random_buffer(random, DType::f32, {2, 7, 48});
    Gradients all(layer, d_out);
    differentiate(layer, layer.inputs(x), all.views());
    const std::vector<Buffer*> expected = all.written();
    for (std::size_t n = 0; n < expected.size(); ++n) {
      Gradients some(layer, d_out);
      LayerGradients one{.d_out = d_out.view()};
      if (n == 0) {
        one.dx = some.dx.view();
      } else {
        for (std::size_t w = 0; w < some.weights.size(); ++w) {
          if (&some.weights[w] == some.written()[n]) one.weights.*all_weights[w] = some.weights[w].view();
        }
      }
      differentiate(layer, layer.inputs(x), one);
      EXPECT_EQ(some.written()[n]->bytes(), expected[n]->bytes()) << name << " tensor " << n;
    }
  }
}

TEST(LayerBackward, every_operation_is_explained) {
  SeededRandom random(26);
  const Layer layer = random_layer(random, small_config("llama-2-7b"), DType::f32);
  const Buffer x = random_buffer(random, DType::f32, {1, 3, 48});
  const Gradients gradients(layer, x);
  const std::vector<Explanation> steps = explain_layer_backward(
      layer.config, layer.weights(), layer.inputs(x), {}, gradients.views(), serial_context());
  // norm, q, k, v, rope, attention, out, norm; ffn, norm, out twice, attention, rope, three times two
  // products, norm
  ASSERT_EQ(steps.size(), 21u);
  EXPECT_EQ(steps[8].problem.rfind("ffn backward f32", 0), 0u) << steps[8].problem;
  EXPECT_EQ(steps[20].problem.rfind("rms norm backward", 0), 0u) << steps[20].problem;
}

TEST(LayerBackward, bad_input_is_named_and_nothing_is_written) {
  struct Mistake {
    std::string_view text;
    void (*make)(LayerInputs&, LayerGradients&);
  };
  const Mistake mistakes[] = {
      {"d_out: expected the shape of x = [2, 3, 48], got none",
       [](LayerInputs&, LayerGradients& g) { g.d_out = {}; }},
      {"d_out: expected a row-major tensor, got other strides",
       [](LayerInputs&, LayerGradients& g) { g.d_out.strides[1] = 0; }},
      {"dx: expected f32, got bf16", [](LayerInputs&, LayerGradients& g) { g.dx.dtype = DType::bf16; }},
      {"k_cache: expected none in backward, got f32[2, 3, 48]",
       [](LayerInputs& i, LayerGradients&) { i.k_cache = i.x; }},
      {"dmask: expected a mask to differentiate, got none",
       [](LayerInputs&, LayerGradients& g) { g.dmask = g.dx; }},
      {"gradients.weights.q_bias: expected weights.q_bias to differentiate, got none",
       [](LayerInputs&, LayerGradients& g) { g.weights.q_bias = g.weights.ffn_norm; }},
      {"gradients.weights.k: expected the shape of weights.k, [48, 48], got f32[47, 48]",
       [](LayerInputs&, LayerGradients& g) { g.weights.k.shape[0] = 47; }},
      {"gradients.weights.up: expected memory that does not overlap dx, got an overlap",
       [](LayerInputs&, LayerGradients& g) { g.dx.data = g.weights.up.data; }},
      {"gradients.weights.q: expected memory that does not overlap d_out, got an overlap",
       [](LayerInputs&, LayerGradients& g) { g.d_out.data = g.weights.q.data; }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(27);
    const Layer layer = random_layer(random, small_config("llama-2-7b"), DType::f32);
    const Buffer x = random_buffer(random, DType::f32, {2, 3, 48});
    Gradients gradients(layer, random_buffer(random, DType::f32, {2, 3, 48}));
    LayerInputs inputs = layer.inputs(x);
    LayerGradients views = gradients.views();
    mistake.make(inputs, views);
    std::vector<std::vector<std::byte>> before;
    for (const Buffer* buffer : gradients.written()) before.push_back(buffer->bytes());
    EXPECT_EQ(thrown<InvalidArgument>([&] {
                layer_backward(layer.config, layer.weights(), inputs, {}, views, serial_context());
              }),
              mistake.text);
    for (std::size_t n = 0; n < before.size(); ++n) EXPECT_EQ(before[n], gradients.written()[n]->bytes());
  }
}

}  // namespace
}  // namespace tilewise::test::layer_test
