#include "tilewise/layer.h"

#include "layer/validate.h"
#include "layer/walk.h"

namespace tilewise {
namespace {

LayerTensors take_tensors(Arena& arena, const LayerConfig& config, const LayerInputs& inputs,
                          const Tensor& out) {
  const TakeRows take{arena, inputs.x};
  const Tensor result = rows_of(out);
  LayerTensors at;
  const Tensor rows = take(config.embed_dim);
  at.attention_input = config.norm_first ? rows : rows_of(inputs.x);
  const std::int64_t queries = config.heads_q * config.head_dim, keys = config.heads_kv * config.head_dim;
  const Tensor qkv = take(queries + 2 * keys);
  at.q = columns_of(qkv, 0, queries);
  at.k = columns_of(qkv, queries, keys);
  at.v = columns_of(qkv, queries + keys, keys);
  at.attention_out = take(queries);
  at.after_attention = result;
  at.ffn_input = config.norm_first ? rows : result;
  at.sum = rows;
  return at;
}

template <typename Visitor>
void walk_forward(const Walk<Visitor>& walk, const LayerTensors& at, const Tensor& out) {
  const Tensor result = rows_of(out);
  walk.up_to_ffn(at);
  if (walk.config.norm_first) {
    walk.ffn(at.ffn_input, at.after_attention, result);
  } else {
    walk.ffn(at.ffn_input, at.ffn_input, at.sum);
    walk.norm(walk.ffn_norm_of(at.sum), result, {});
  }
}

auto forward_pass(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                  const LayerOptions& options, const LayerOutputs& outputs) {
  return LayerPass{[&](Arena& arena) { return take_tensors(arena, config, inputs, outputs.out); },
                   [&]<typename Visitor>(const LayerTensors& at, Visitor& visit) {
                     walk_forward(Walk<Visitor>{config, weights, inputs, options, visit}, at, outputs.out);
                   }};
}

}  // namespace

void layer_forward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerOutputs& outputs, const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  forward_pass(config, weights, inputs, options, outputs).run(context);
}

std::size_t layer_workspace(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                            const LayerOptions& options, const LayerOutputs& outputs,
                            const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  return forward_pass(config, weights, inputs, options, outputs).workspace(context);
}

std::vector<Explanation> explain_layer(const LayerConfig& config, const LayerWeights& weights,
                                       const LayerInputs& inputs, const LayerOptions& options,
                                       const LayerOutputs& outputs, const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  return forward_pass(config, weights, inputs, options, outputs).explain(context);
}

}  // namespace tilewise
