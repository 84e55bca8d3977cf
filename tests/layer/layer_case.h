#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "layer/plain.h"

// Layers of random weights, and what their passes are held to.
namespace tilewise::test::layer_case {

inline constexpr Tensor LayerWeights::* all_weights[] = {&LayerWeights::q,
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

inline LayerWeights views_of(const std::vector<Buffer>& memory) {
  LayerWeights weights;
  for (std::size_t n = 0; n < memory.size(); ++n) weights.*all_weights[n] = memory[n].view();
  return weights;
}

struct Layer {
  LayerConfig config;
  std::vector<Buffer> memory;  // in the order of all_weights
  Buffer cos, sin;

  LayerWeights weights() const { return views_of(memory); }
  LayerInputs inputs(const Buffer& x) const {
    LayerInputs inputs;
    inputs.x = x.view();
    inputs.cos = cos.view();
    inputs.sin = sin.view();
    return inputs;
  }
};

inline LayerConfig small_config(std::string_view name) {
  LayerConfig config = layer_config(name);
  config.embed_dim = 48;
  config.heads_q = 6;
  config.heads_kv = config.heads_kv == 8 ? 2 : 6;
  config.head_dim = 8;
  config.ffn_dim = 70;
  return config;
}

inline constexpr std::int64_t positions = 40;

inline Layer random_layer(Random& random, const LayerConfig& config, DType dtype) {
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

inline Layer exact_layer(const Layer& layer) {
  Layer result = layer;
  for (Buffer& buffer : result.memory) buffer = exact(buffer);
  result.cos = exact(layer.cos);
  result.sin = exact(layer.sin);
  return result;
}

inline std::vector<Tensor*> tensors_of(LayerWeights& weights) {
  std::vector<Tensor*> tensors;
  for (Tensor LayerWeights::* member : all_weights) tensors.push_back(&(weights.*member));
  return tensors;
}

inline std::vector<Tensor*> tensors_of(LayerWeights& weights, LayerInputs& inputs) {
  std::vector<Tensor*> tensors = tensors_of(weights);
  for (Tensor* tensor :
       {&inputs.x, &inputs.cos, &inputs.sin, &inputs.positions, &inputs.mask, &inputs.k_cache,
        &inputs.v_cache, &inputs.cache_starts, &inputs.key_lengths, &inputs.page_table}) {
    tensors.push_back(tensor);
  }
  return tensors;
}

inline void run(const Layer& layer, LayerInputs inputs, const Buffer& out,
                const Context& context = serial_context()) {
  LayerOutputs outputs{out.view()};
  LayerWeights weights = layer.weights();
  std::vector<Tensor*> tensors = tensors_of(weights, inputs);
  tensors.push_back(&outputs.out);
  call_on(
      context, tensors,
      [&](const Context& c) { return layer_workspace(layer.config, weights, inputs, {}, outputs, c); },
      [&](const Context& c) { layer_forward(layer.config, weights, inputs, {}, outputs, c); });
}

inline double largest_difference(const Buffer& a, const Buffer& b) {
  const std::vector<double> x = a.values(), y = b.values();
  double largest = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double difference = std::abs(x[n] - y[n]);
    if (!(difference <= largest)) largest = difference;  // a NaN, too
  }
  return largest;
}

// The gradients of all that a layer has.
struct Gradients {
  Buffer d_out, dx;
  std::vector<Buffer> weights;
  Buffer dmask;

  Gradients(const Layer& layer, const Buffer& out_gradient, const Buffer& mask = {})
      : d_out(out_gradient), dx(d_out.dtype(), d_out.shape()) {
    for (const Buffer& weight : layer.memory) {
      weights.push_back(weight.given() ? Buffer(weight.dtype(), weight.shape()) : Buffer());
    }
    if (mask.given()) dmask = Buffer(mask.dtype(), mask.shape());
    for (Buffer* buffer : written()) buffer->poison();
  }
  LayerGradients views() const {
    return {.d_out = d_out.view(), .dx = dx.view(), .dmask = dmask.view(), .weights = views_of(weights)};
  }
  std::vector<Buffer*> written() {
    std::vector<Buffer*> all = {&dx};
    for (Buffer& weight : weights) all.push_back(&weight);
    all.push_back(&dmask);
    std::erase_if(all, [](const Buffer* buffer) { return !buffer->given(); });
    return all;
  }
};

inline void differentiate(const Layer& layer, LayerInputs inputs, LayerGradients gradients,
                          const Context& context = serial_context()) {
  LayerWeights weights = layer.weights();
  std::vector<Tensor*> tensors = tensors_of(weights, inputs);
  for (Tensor* tensor : {&gradients.d_out, &gradients.dx, &gradients.dmask}) tensors.push_back(tensor);
  for (Tensor* tensor : tensors_of(gradients.weights)) tensors.push_back(tensor);
  call_on(
      context, tensors,
      [&](const Context& c) {
        return layer_backward_workspace(layer.config, weights, inputs, {}, gradients, c);
      },
      [&](const Context& c) { layer_backward(layer.config, weights, inputs, {}, gradients, c); });
}

// A mask that is added to the scores, where a configuration is tested with one.
inline Buffer mask_for(Random& random, std::string_view name, DType dtype) {
  return name == "bert-base" ? random_buffer(random, dtype, {2, 1, 1, 7}) : Buffer();
}

/// Every configuration, in every type that kernels take.
template <typename Check>
void for_every_layer(const Check& check) {
  for (const std::string_view name : layer_configs()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) check(name, dtype);
  }
}

inline double unit_of(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

inline void check_forward(Random& random, std::string_view name, DType dtype, const Context& context) {
  const Layer layer = random_layer(random, small_config(name), dtype);
  const Buffer x = random_buffer(random, dtype, {2, 13, 48});
  Buffer out(dtype, {2, 13, 48}), truth(DType::f64, {2, 13, 48});
  out.poison();
  run(layer, layer.inputs(x), out, context);
  const Layer wide = exact_layer(layer);
  const Buffer wide_x = exact(x);
  run(wide, wide.inputs(wide_x), truth);
  // Results reach 8; what stands between is rounded a dozen times.
  EXPECT_LT(largest_difference(out, truth), 8 * 6 * unit_of(dtype)) << name << ' ' << to_string(dtype);
  EXPECT_TRUE(out.guards_intact());
}

inline void check_backward(Random& random, std::string_view name, DType dtype, const Context& context) {
  const Layer layer = random_layer(random, small_config(name), dtype);
  const Layer wide = exact_layer(layer);
  const Buffer x = random_buffer(random, dtype, {2, 7, 48});
  const Buffer mask = mask_for(random, name, dtype);
  const Buffer d_out = random_buffer(random, dtype, {2, 7, 48});
  const Buffer wide_x = exact(x), wide_mask = exact(mask);
  Gradients gradients(layer, d_out, mask), truth(wide, exact(d_out), wide_mask);
  LayerInputs inputs = layer.inputs(x), wide_inputs = wide.inputs(wide_x);
  inputs.mask = mask.view();
  wide_inputs.mask = wide_mask.view();
  differentiate(layer, inputs, gradients.views(), context);
  differentiate(wide, wide_inputs, truth.views());
  const std::vector<Buffer*> all = gradients.written(), true_ones = truth.written();
  for (std::size_t n = 0; n < all.size(); ++n) {
    // What stands between is rounded two dozen times, and gradients are sums of such terms, of the size
    // of 1: those of k's bias are 0, all their terms cancelling.
    double largest = 1;
    for (const double value : true_ones[n]->values()) largest = std::max(largest, std::abs(value));
    EXPECT_LT(largest_difference(*all[n], *true_ones[n]), 12 * unit_of(dtype) * largest)
        << name << ' ' << to_string(dtype) << " tensor " << n;
    EXPECT_TRUE(all[n]->guards_intact());
  }
}

}  // namespace tilewise::test::layer_case
