#include "tilewise/layer.h"

#include "core/kernel_list.h"
#include "layer/validate.h"
#include "layer/walk.h"

namespace tilewise {
namespace {

Places take_places(Arena& arena, const LayerConfig& config, const LayerInputs& inputs, const Tensor& out) {
  const TakeRows take{arena, inputs.x};
  const Tensor result = rows_of(out);
  Places at;
  const Tensor rows = take(config.embed_dim);
  at.attended = config.norm_first ? rows : rows_of(inputs.x);
  const std::int64_t queries = config.heads_q * config.head_dim, keys = config.heads_kv * config.head_dim;
  const Tensor qkv = take(queries + 2 * keys);
  at.q = columns_of(qkv, 0, queries);
  at.k = columns_of(qkv, queries, keys);
  at.v = columns_of(qkv, queries + keys, keys);
  at.heads = take(queries);
  at.middle = result;
  at.normal = config.norm_first ? rows : result;
  at.sum = rows;
  return at;
}

template <typename Visitor>
void walk_forward(const Walk<Visitor>& walk, const Places& at, const Tensor& out) {
  const Tensor result = rows_of(out);
  walk.up_to_network(at);
  if (walk.config.norm_first) {
    walk.network(at.normal, at.middle, result);
  } else {
    walk.network(at.normal, at.normal, at.sum);
    walk.norm(walk.ffn_norm_of(at.sum), result, {});
  }
}

}  // namespace

void layer_forward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerOutputs& outputs, const Context& context) {
  const std::size_t needed = layer_workspace(config, weights, inputs, options, outputs, context);
  Context inner = with_aligned_workspace(context, needed);
  Arena arena(inner.workspace.data);
  const Places at = take_places(arena, config, inputs, outputs.out);
  inner.workspace.data = static_cast<std::byte*>(inner.workspace.data) + arena.rounded();
  inner.workspace.bytes -= arena.rounded();
  Launch launch{inner};
  walk_forward(Walk<Launch>{config, weights, inputs, options, launch}, at, outputs.out);
}

std::size_t layer_workspace(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                            const LayerOptions& options, const LayerOutputs& outputs,
                            const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  Arena arena = absent_arena();
  const Places at = take_places(arena, config, inputs, outputs.out);
  Measure measure{context};
  walk_forward(Walk<Measure>{config, weights, inputs, options, measure}, at, outputs.out);
  arena.take<std::byte>(measure.bytes);
  return arena.used() + workspace_alignment - 1;
}

std::vector<Explanation> explain_layer(const LayerConfig& config, const LayerWeights& weights,
                                       const LayerInputs& inputs, const LayerOptions& options,
                                       const LayerOutputs& outputs, const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  Arena arena = absent_arena();
  const Places at = take_places(arena, config, inputs, outputs.out);
  Explain explain{context};
  walk_forward(Walk<Explain>{config, weights, inputs, options, explain}, at, outputs.out);
  return explain.found;
}

}  // namespace tilewise
