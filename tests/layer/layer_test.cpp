#include <cmath>

#include "layer/plain.h"

namespace tilewise::test {
namespace {

constexpr const Tensor LayerWeights::* all_weights[] = {&LayerWeights::q,
                                                        &LayerWeights::q_bias,
                                                        &LayerWeights::k,
                                                        &LayerWeights::k_bias,
                                                        &LayerWeights::v,
                                                        &LayerWeights::v_bias,
                                                        &LayerWeights::out,
                                                        &LayerWeights::out_bias,
                                                        &LayerWeights::up,
                                                        &LayerWeights::up_bias,
                                                        &LayerWeights::gate,
                                                        &LayerWeights::gate_bias,
                                                        &LayerWeights::down,
                                                        &LayerWeights::down_bias,
                                                        &LayerWeights::attention_norm,
                                                        &LayerWeights::attention_norm_bias,
                                                        &LayerWeights::ffn_norm,
                                                        &LayerWeights::ffn_norm_bias};

struct Layer {
  LayerConfig config;
  std::vector<Buffer> memory;  // in the order of all_weights
  Buffer cos, sin;

  LayerWeights weights() const {
    LayerWeights weights;
    for (std::size_t n = 0; n < memory.size(); ++n) {
      const_cast<Tensor&>(weights.*all_weights[n]) = memory[n].view();
    }
    return weights;
  }
  LayerInputs inputs(const Buffer& x) const {
    LayerInputs inputs;
    inputs.x = x.view();
    inputs.cos = cos.view();
    inputs.sin = sin.view();
    return inputs;
  }
};

LayerConfig small_config(std::string_view name) {
  LayerConfig config = layer_config(name);
  config.embed_dim = 48;
  config.heads_q = 6;
  config.heads_kv = config.heads_kv == 8 ? 2 : 6;
  config.head_dim = 8;
  config.ffn_dim = 70;
  return config;
}

constexpr std::int64_t positions = 40;

Layer random_layer(Random& random, const LayerConfig& config, DType dtype) {
  Layer layer{.config = config, .memory = {}, .cos = {}, .sin = {}};
  const auto weight = [&](std::int64_t rows, std::int64_t columns) {
    layer.memory.push_back(
        random_buffer(random, dtype, {rows, columns}, 1 / std::sqrt(static_cast<double>(columns))));
  };
  const bool biased = config.norm == Norm::layer;  // encoders have biases, Llama has none
  const auto bias = [&](std::int64_t count, bool given) {
    layer.memory.push_back(given ? random_buffer(random, dtype, {count}, 0.2) : Buffer());
  };
  const std::int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  const auto linear = [&](std::int64_t rows, std::int64_t columns) {
    weight(rows, columns);
    bias(rows, biased);
  };
  linear(width_q, config.embed_dim);
  linear(width_kv, config.embed_dim);
  linear(width_kv, config.embed_dim);
  linear(config.embed_dim, width_q);
  linear(config.ffn_dim, config.embed_dim);
  if (config.gated) {
    linear(config.ffn_dim, config.embed_dim);
  } else {
    layer.memory.resize(layer.memory.size() + 2);
  }
  linear(config.embed_dim, config.ffn_dim);
  for (int n = 0; n < 2; ++n) {
    bias(config.embed_dim, true);
    bias(config.embed_dim, biased);
  }
  if (config.rotary) {
    layer.cos = Buffer(DType::f32, {positions, config.head_dim / 2});
    layer.sin = Buffer(DType::f32, {positions, config.head_dim / 2});
    for (std::int64_t p = 0; p < positions; ++p) {
      for (std::int64_t n = 0; n < config.head_dim / 2; ++n) {
        const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(n) / 8);
        layer.cos.set({p, n}, std::cos(angle));
        layer.sin.set({p, n}, std::sin(angle));
      }
    }
  }
  return layer;
}

Layer exact_layer(const Layer& layer) {
  Layer result = layer;
  for (Buffer& buffer : result.memory) buffer = exact(buffer);
  result.cos = exact(layer.cos);
  result.sin = exact(layer.sin);
  return result;
}

void run(const Layer& layer, const LayerWeights& weights, const LayerInputs& inputs, const Buffer& out,
         Context context = serial_context()) {
  const LayerOutputs outputs{out.view()};
  with_workspace(layer_workspace(layer.config, weights, inputs, {}, outputs, context),
                 [&](Workspace workspace) {
                   context.workspace = workspace;
                   layer_forward(layer.config, weights, inputs, {}, outputs, context);
                 });
}

void run(const Layer& layer, const LayerInputs& inputs, const Buffer& out,
         const Context& context = serial_context()) {
  run(layer, layer.weights(), inputs, out, context);
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

double largest_difference(const Buffer& a, const Buffer& b) {
  const std::vector<double> x = a.values(), y = b.values();
  double largest = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double difference = std::abs(x[n] - y[n]);
    if (!(difference <= largest)) largest = difference;  // a NaN, too
  }
  return largest;
}

TEST(Layer, every_configuration_is_near_the_truth) {
  for (const std::string_view name : layer_configs()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SeededRandom random(17);
      const Layer layer = random_layer(random, small_config(name), dtype);
      const Buffer x = random_buffer(random, dtype, {2, 13, 48});
      Buffer out(dtype, {2, 13, 48}), truth(DType::f64, {2, 13, 48});
      out.poison();
      run(layer, layer.inputs(x), out, random_context(random));
      const Layer wide = exact_layer(layer);
      const Buffer wide_x = exact(x);
      run(wide, wide.inputs(wide_x), truth);
      // Results reach 8; what stands between is rounded a dozen times.
      const double unit = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
      EXPECT_LT(largest_difference(out, truth), 8 * 6 * unit) << name << ' ' << to_string(dtype);
      EXPECT_TRUE(out.guards_intact());
    }
  }
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
    run(layer, weights, layer.inputs(x), together);
    EXPECT_LT(largest_difference(apart, together), 1e-5) << name;
    const auto steps = [&](const LayerWeights& of) {
      return explain_layer(layer.config, of, layer.inputs(x), {}, {together.view()}, serial_context()).size();
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

}  // namespace
}  // namespace tilewise::test
