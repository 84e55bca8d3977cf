#include "layer/layer_case.h"

#include <limits>
#include <optional>

#include "fuzz/oracle.h"

namespace tilewise::fuzz {
namespace {

using test::Buffer;
using test::Random;

constexpr std::string_view weight_names[] = {"weights.q",
                                             "weights.q_bias",
                                             "weights.k",
                                             "weights.k_bias",
                                             "weights.v",
                                             "weights.v_bias",
                                             "weights.out",
                                             "weights.out_bias",
                                             "weights.up",
                                             "weights.up_bias",
                                             "weights.gate",
                                             "weights.gate_bias",
                                             "weights.down",
                                             "weights.down_bias",
                                             "weights.attention_norm",
                                             "weights.attention_norm_bias",
                                             "weights.ffn_norm",
                                             "weights.ffn_norm_bias"};

LayerConfig random_config(Random& random) {
  LayerConfig config;
  config.embed_dim = random.between(1, 24);
  config.heads_kv = random.between(1, 3);
  config.heads_q = config.heads_kv * random.between(1, 3);
  config.head_dim = random.between(1, 6) * 2;
  config.ffn_dim = random.between(1, 40);
  config.norm = random.pick({Norm::rms, Norm::layer});
  config.norm_first = random.chance(0.5);
  config.gated = random.chance(0.5);
  config.activation =
      random.pick({Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu});
  config.causal = random.chance(0.5);
  config.rotary = random.chance(0.5);
  config.pairs = random.pick({RopePairs::halves, RopePairs::interleaved});
  return config;
}

// A cache that the new tokens are written to, behind those that it has.
struct Cache {
  Buffer k, v, starts, lengths, page_table;

  Cache(Random& random, const LayerConfig& config, DType dtype, std::int64_t batch, std::int64_t length) {
    constexpr std::int64_t most_before = 5, page = 3;
    const std::int64_t capacity = length + most_before, pages = (capacity + page - 1) / page;
    const bool paged = random.chance(0.5);
    const test::Shape shape = paged ? test::Shape{batch * pages, config.heads_kv, page, config.head_dim}
                                    : test::Shape{batch, config.heads_kv, capacity, config.head_dim};
    k = test::random_buffer(random, dtype, shape);
    v = test::random_buffer(random, dtype, shape);
    starts = Buffer(DType::i32, {batch});
    lengths = Buffer(DType::i32, {batch});
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto before = static_cast<double>(random.between(0, most_before));
      starts.set({b}, before);
      lengths.set({b}, before + static_cast<double>(length));
    }
    if (!paged) return;
    page_table = Buffer(DType::i32, {batch, pages});
    std::vector<double> table(static_cast<std::size_t>(batch * pages));
    for (std::size_t n = 0; n < table.size(); ++n) table[n] = static_cast<double>(n);
    random.shuffle(table);
    page_table.set_values(table);
  }
};

// What both passes take.
struct Problem {
  DType dtype;
  std::int64_t batch, length;
  test::layer_case::Layer layer;
  Buffer x, mask;
  LayerConfig config;
  LayerWeights weights;
  LayerInputs inputs;
  LayerOptions options;

  explicit Problem(Random& random)
      : dtype(random.pick({DType::f32, DType::f16, DType::bf16, DType::f64})),
        batch(random.between(random.chance(0.05) ? 0 : 1, 3)),
        length(random.between(random.chance(0.05) ? 0 : 1, 9)),
        layer(test::layer_case::random_layer(random, random_config(random), dtype)),
        x(test::random_buffer(random, dtype, {batch, length, layer.config.embed_dim})),
        config(layer.config),
        weights(layer.weights()),
        inputs(layer.inputs(x)) {
    if (random.chance(0.3)) {
      mask = test::random_buffer(random, dtype, {batch, 1, length, length});
      inputs.mask = mask.view();
    }
    options.deterministic = random.chance(0.5);
    if (random.chance(0.3)) options.max_intermediate_bytes = static_cast<std::size_t>(random.between(1, 900));
  }

  void add_to(Call& call) {
    for (std::size_t n = 0; n < std::size(weight_names); ++n) {
      call.add(weight_names[n], weights.*test::layer_case::all_weights[n]);
    }
    call.add("x", inputs.x);
    call.add("cos", inputs.cos);
    call.add("sin", inputs.sin);
    call.add("positions", inputs.positions);
    call.add("mask", inputs.mask);
    call.add("k_cache", inputs.k_cache, Use::updated);
    call.add("v_cache", inputs.v_cache, Use::updated);
    call.add("cache_starts", inputs.cache_starts);
    call.add("key_lengths", inputs.key_lengths);
    call.add("page_table", inputs.page_table);
    const auto extent = [](std::uint8_t how, std::int64_t old) {
      constexpr std::int64_t values[] = {0,
                                         -1,
                                         1,
                                         std::int64_t{1} << 62,
                                         std::int64_t{1} << 32,
                                         std::numeric_limits<std::int64_t>::max(),
                                         std::numeric_limits<std::int64_t>::min()};
      return how % 8 == 7 ? old + 1 : values[how % 8];
    };
    call.mistakes = {
        [this, extent](std::uint8_t how) { config.embed_dim = extent(how, config.embed_dim); },
        [this, extent](std::uint8_t how) { config.heads_q = extent(how, config.heads_q); },
        [this, extent](std::uint8_t how) { config.heads_kv = extent(how, config.heads_kv); },
        [this, extent](std::uint8_t how) { config.head_dim = extent(how, config.head_dim); },
        [this, extent](std::uint8_t how) { config.ffn_dim = extent(how, config.ffn_dim); },
        [this](std::uint8_t how) { config.norm = static_cast<Norm>(how); },
        [this](std::uint8_t how) { config.activation = static_cast<Activation>(how); },
        [this](std::uint8_t how) { config.pairs = static_cast<RopePairs>(how); },
        [this](std::uint8_t how) {
          config.epsilon = how % 2 == 0 ? -1.0f : std::numeric_limits<float>::quiet_NaN();
        },
        [this](std::uint8_t how) { config.rotary = how % 2 == 0; },
        [this](std::uint8_t how) { config.gated = how % 2 == 0; },
        [this](std::uint8_t how) { options.precision = static_cast<Precision>(how); },
        [this](std::uint8_t) { options.max_intermediate_bytes = std::numeric_limits<std::size_t>::max(); }};
  }
};

void fuzz_forward(Problem& p, Random& random, const Input& input) {
  std::optional<Cache> cache;
  if (p.batch > 0 && random.chance(0.5)) {
    cache.emplace(random, p.config, p.dtype, p.batch, p.length);
    p.inputs.k_cache = cache->k.view();
    p.inputs.v_cache = cache->v.view();
    p.inputs.cache_starts = cache->starts.view();
    p.inputs.key_lengths = cache->lengths.view();
    p.inputs.page_table = cache->page_table.view();
    p.inputs.mask = {};
  }
  const Buffer buffer(p.dtype, p.x.shape());
  LayerOutputs out{buffer.view()};
  Call call{.name = "layer forward", .written_pages = &p.inputs.page_table};
  p.add_to(call);
  call.add("out", out.out, Use::written);
  call.workspace = [&](const Context& c) {
    return layer_workspace(p.config, p.weights, p.inputs, p.options, out, c);
  };
  call.run = [&](const Context& c) { layer_forward(p.config, p.weights, p.inputs, p.options, out, c); };
  call.explain = [&](const Context& c) {
    return explain_layer(p.config, p.weights, p.inputs, p.options, out, c);
  };
  check_call(call, input);
}

void fuzz_backward(Problem& p, Random& random, const Input& input) {
  test::layer_case::Gradients buffers(p.layer, test::random_buffer(random, p.dtype, p.x.shape()), p.mask);
  LayerGradients gradients = buffers.views();
  if (random.chance(0.3)) gradients.dx = {};
  if (random.chance(0.3)) gradients.dmask = {};
  Call call{.name = "layer backward"};
  p.add_to(call);
  call.add("d_out", gradients.d_out);
  call.add("dx", gradients.dx, Use::written);
  call.add("dmask", gradients.dmask, Use::written);
  for (std::size_t n = 0; n < std::size(weight_names); ++n) {
    Tensor& gradient = gradients.weights.*test::layer_case::all_weights[n];
    if (random.chance(0.1)) gradient = {};
    call.add(weight_names[n], gradient, Use::written);
  }
  call.workspace = [&](const Context& c) {
    return layer_backward_workspace(p.config, p.weights, p.inputs, p.options, gradients, c);
  };
  call.run = [&](const Context& c) {
    layer_backward(p.config, p.weights, p.inputs, p.options, gradients, c);
  };
  call.explain = [&](const Context& c) {
    return explain_layer_backward(p.config, p.weights, p.inputs, p.options, gradients, c);
  };
  check_call(call, input);
}

}  // namespace

void fuzz_layer(std::span<const std::uint8_t> bytes) {
  const Input input(bytes);
  Random random = input.random();
  Problem problem(random);
  if (input.operation() % 2 == 0) {
    fuzz_forward(problem, random, input);
  } else {
    fuzz_backward(problem, random, input);
  }
}

}  // namespace tilewise::fuzz
