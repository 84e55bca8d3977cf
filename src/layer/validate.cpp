#include "layer/validate.h"

#include <array>
#include <span>
#include <vector>

#include "core/checks.h"
#include "core/sizes.h"

namespace tilewise {
namespace {

struct WeightName {
  std::string_view name, gradient;
  Tensor LayerWeights::* member;
};

constexpr WeightName weight_names[] = {
    {"weights.q", "gradients.weights.q", &LayerWeights::q},
    {"weights.q_bias", "gradients.weights.q_bias", &LayerWeights::q_bias},
    {"weights.k", "gradients.weights.k", &LayerWeights::k},
    {"weights.k_bias", "gradients.weights.k_bias", &LayerWeights::k_bias},
    {"weights.v", "gradients.weights.v", &LayerWeights::v},
    {"weights.v_bias", "gradients.weights.v_bias", &LayerWeights::v_bias},
    {"weights.out", "gradients.weights.out", &LayerWeights::out},
    {"weights.out_bias", "gradients.weights.out_bias", &LayerWeights::out_bias},
    {"weights.up", "gradients.weights.up", &LayerWeights::up},
    {"weights.up_bias", "gradients.weights.up_bias", &LayerWeights::up_bias},
    {"weights.gate", "gradients.weights.gate", &LayerWeights::gate},
    {"weights.gate_bias", "gradients.weights.gate_bias", &LayerWeights::gate_bias},
    {"weights.down", "gradients.weights.down", &LayerWeights::down},
    {"weights.down_bias", "gradients.weights.down_bias", &LayerWeights::down_bias},
    {"weights.attention_norm", "gradients.weights.attention_norm", &LayerWeights::attention_norm},
    {"weights.attention_norm_bias", "gradients.weights.attention_norm_bias",
     &LayerWeights::attention_norm_bias},
    {"weights.ffn_norm", "gradients.weights.ffn_norm", &LayerWeights::ffn_norm},
    {"weights.ffn_norm_bias", "gradients.weights.ffn_norm_bias", &LayerWeights::ffn_norm_bias},
};

void check_config(const LayerConfig& config) {
  const auto positive = [](std::int64_t value, std::string_view name) {
    check(value >= 1, name, "1 or above", value);
  };
  positive(config.embed_dim, "config.embed_dim");
  positive(config.heads_q, "config.heads_q");
  positive(config.heads_kv, "config.heads_kv");
  positive(config.head_dim, "config.head_dim");
  positive(config.ffn_dim, "config.ffn_dim");
  check(
      config.heads_q % config.heads_kv == 0, "config.heads_kv",
      [&] { return "a divisor of heads_q " + std::to_string(config.heads_q); }, config.heads_kv);
  check(
      bounded_product(config.heads_q, config.head_dim) < std::int64_t{1} << 56, "config.head_dim",
      [&] { return "fewer than 2^56 features in " + std::to_string(config.heads_q) + " heads"; },
      config.head_dim);
  check_enumerator(config.norm, Norm::layer, "config.norm", "rms or layer");
  check_activation(config.activation, "config.activation");
  check_enumerator(config.pairs, RopePairs::interleaved, "config.pairs", "halves or interleaved");
}

struct Expected {
  const Tensor& x;
  const Context& context;

  void matrix(const Tensor& tensor, std::string_view name, std::int64_t rows, std::int64_t columns) const {
    check_shape(tensor, name, {rows, columns}, "[out, in]", context);
    check_dtype(tensor, name, x.dtype);
  }
  void vector(const Tensor& tensor, std::string_view name, std::int64_t count) const {
    if (!tensor.given()) return;
    check_shape(tensor, name, {count}, "a value for each output", context);
    check(
        tensor.dtype == x.dtype || tensor.dtype == DType::f32, name,
        [&] { return "f32 or the type of x, " + std::string(to_string(x.dtype)); }, to_string(tensor.dtype));
  }
};

void check_weights(const LayerConfig& config, const LayerWeights& weights, const Expected& expected) {
  const std::int64_t embed = config.embed_dim, hidden = config.ffn_dim;
  const std::int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  expected.matrix(weights.q, "weights.q", width_q, embed);
  expected.matrix(weights.k, "weights.k", width_kv, embed);
  expected.matrix(weights.v, "weights.v", width_kv, embed);
  expected.matrix(weights.out, "weights.out", embed, width_q);
  expected.matrix(weights.up, "weights.up", hidden, embed);
  expected.matrix(weights.down, "weights.down", embed, hidden);
  if (config.gated) {
    expected.matrix(weights.gate, "weights.gate", hidden, embed);
  } else {
    check(!weights.gate.given(), "weights.gate", "none without a gate", weights.gate);
  }
  expected.vector(weights.q_bias, "weights.q_bias", width_q);
  expected.vector(weights.k_bias, "weights.k_bias", width_kv);
  expected.vector(weights.v_bias, "weights.v_bias", width_kv);
  expected.vector(weights.out_bias, "weights.out_bias", embed);
  expected.vector(weights.up_bias, "weights.up_bias", hidden);
  expected.vector(weights.gate_bias, "weights.gate_bias", hidden);
  expected.vector(weights.down_bias, "weights.down_bias", embed);
  expected.vector(weights.attention_norm, "weights.attention_norm", embed);
  expected.vector(weights.attention_norm_bias, "weights.attention_norm_bias", embed);
  expected.vector(weights.ffn_norm, "weights.ffn_norm", embed);
  expected.vector(weights.ffn_norm_bias, "weights.ffn_norm_bias", embed);
}

bool row_major(const Tensor& tensor) {
  const Tensor plain(nullptr, tensor.dtype,
                     std::span(tensor.shape).first(static_cast<std::size_t>(tensor.rank)));
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.extent(dim) > 1 && tensor.stride(dim) != plain.stride(dim)) return false;
  }
  return true;
}

// The inputs besides x and the weights that a layer reads and never writes.
std::array<Named, 7> other_inputs(const LayerInputs& inputs) {
  return {{{"cos", &inputs.cos},
           {"sin", &inputs.sin},
           {"positions", &inputs.positions},
           {"mask", &inputs.mask},
           {"cache_starts", &inputs.cache_starts},
           {"key_lengths", &inputs.key_lengths},
           {"page_table", &inputs.page_table}}};
}

// Each operation checks that its outputs do not overlap its inputs. This checks across operations: an output
// may not overwrite what a later operation reads.
void check_layer_written(std::span<const Named> written, std::span<const Named> read,
                         const LayerWeights& weights, const LayerInputs& inputs) {
  std::vector<Named> all = {{"x", &inputs.x}};
  all.insert(all.end(), read.begin(), read.end());
  for (const Named& input : other_inputs(inputs)) all.push_back(input);
  for (const WeightName& names : weight_names) all.push_back({names.name, &(weights.*names.member)});
  check_written(written, all);
}

void check_inputs(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                  const Context& context) {
  check_config(config);
  check_context(context);
  const Tensor& x = inputs.x;
  check(
      x.rank == 3 && x.extent(2) == config.embed_dim, "x",
      [&] { return "rank 3 [B, S, E] with E " + std::to_string(config.embed_dim); }, x);
  check(is_floating(x.dtype), "x", "f32, f16, bf16 or f64", to_string(x.dtype));
  check_memory(x, "x", context);
  check(row_major(x), "x", "a row-major tensor", "other strides");
  check_weights(config, weights, {x, context});
  check(inputs.cos.given() == config.rotary && inputs.sin.given() == config.rotary, "cos",
        config.rotary ? "tables of the rotary embedding" : "none without a rotary embedding", inputs.cos);
  for (const Named& input : other_inputs(inputs)) {
    if (input.tensor->given()) check_memory(*input.tensor, input.name, context);
  }
}

// Checks a tensor that has the shape and type of x.
void check_like_x(const Tensor& tensor, std::string_view name, const Tensor& x, const Context& context) {
  check_shape(tensor, name, {x.extent(0), x.extent(1), x.extent(2)}, "the shape of x", context);
  check_dtype(tensor, name, x.dtype);
  check(row_major(tensor), name, "a row-major tensor", "other strides");
}

void check_gradient(const Tensor& gradient, const WeightName& names, const Tensor& of,
                    const Context& context) {
  if (!gradient.given()) return;
  check(of.given(), names.gradient, [&] { return std::string(names.name) + " to differentiate"; }, "none");
  check(
      same_shape(gradient, of), names.gradient,
      [&] { return "the shape of " + std::string(names.name) + ", " + shape_string(of); }, gradient);
  check_memory(gradient, names.gradient, context);
  check_dtype(gradient, names.gradient, of.dtype);
  check_contiguous_last(gradient, names.gradient);
}

}  // namespace

void check_layer(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                 const LayerOutputs& outputs, const Context& context) {
  check_inputs(config, weights, inputs, context);
  const Tensor& x = inputs.x;
  check_like_x(outputs.out, "out", x, context);
  const std::array<Named, 3> written = {
      {{"k_cache", &inputs.k_cache}, {"v_cache", &inputs.v_cache}, {"out", &outputs.out}}};
  for (const Named& cache : std::span(written).first(2)) {
    if (cache.tensor->given()) check_memory(*cache.tensor, cache.name, context);
  }
  check_layer_written(written, {}, weights, inputs);
  const bool cached = inputs.k_cache.given();
  check(inputs.v_cache.given() == cached, "v_cache", "both k_cache and v_cache, or neither", inputs.v_cache);
  check(inputs.key_lengths.given() == cached, "key_lengths",
        cached ? "i32 [B] with a cache" : "none without a cache", inputs.key_lengths);
  check(!cached || !inputs.mask.given(), "mask", "none with a cache", inputs.mask);
}

void check_layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                          const LayerGradients& gradients, const Context& context) {
  check_inputs(config, weights, inputs, context);
  for (const Named& given :
       {Named{"k_cache", &inputs.k_cache}, Named{"v_cache", &inputs.v_cache},
        Named{"cache_starts", &inputs.cache_starts}, Named{"key_lengths", &inputs.key_lengths},
        Named{"page_table", &inputs.page_table}}) {
    check(!given.tensor->given(), given.name, "none in backward", *given.tensor);
  }
  check_like_x(gradients.d_out, "d_out", inputs.x, context);
  if (gradients.dx.given()) check_like_x(gradients.dx, "dx", inputs.x, context);
  check(inputs.mask.given() || !gradients.dmask.given(), "dmask", "a mask to differentiate", "none");
  if (gradients.dmask.given()) check_memory(gradients.dmask, "dmask", context);
  std::vector<Named> written = {{"dx", &gradients.dx}, {"dmask", &gradients.dmask}};
  for (const WeightName& names : weight_names) {
    const Tensor& gradient = gradients.weights.*names.member;
    check_gradient(gradient, names, weights.*names.member, context);
    written.push_back({names.gradient, &gradient});
  }
  check_layer_written(written, std::array<Named, 1>{{{"d_out", &gradients.d_out}}}, weights, inputs);
}

}  // namespace tilewise
