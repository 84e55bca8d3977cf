#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/buffer.h"
#include "tilewise/tilewise.h"

namespace tilewise::test {

/// A sound call of one operation on small tensors, and all there is to spoil in it.
struct Operation {
  struct Argument {
    std::string name;  ///< as messages name it
    Tensor* tensor;
  };
  std::string name;
  std::shared_ptr<std::deque<Buffer>> memory = std::make_shared<std::deque<Buffer>>();
  std::vector<Argument> arguments{};
  std::function<std::size_t(const Context&)> workspace{};
  std::function<void(const Context&)> call{};

  void add(const std::string& argument, Tensor& tensor, DType dtype, const Shape& shape) {
    Buffer& buffer = memory->emplace_back(dtype, shape);
    buffer.fill(is_floating(dtype) ? 0.5 : 0.0);
    tensor = buffer.view();
    arguments.push_back({argument, &tensor});
  }
  void add(const std::string& argument, Tensor& tensor, const Shape& shape) {
    add(argument, tensor, DType::f32, shape);
  }
  std::vector<std::vector<std::byte>> bytes() const {
    std::vector<std::vector<std::byte>> all;
    for (const Buffer& buffer : *memory) all.push_back(buffer.bytes());
    return all;
  }
  /// Calls it with the workspace it asks for.
  void run(Context context) const {
    with_workspace(workspace(context), [&](Workspace space) {
      context.workspace = space;
      call(context);
    });
  }
};

template <typename Inputs, typename Options, typename Outputs>
struct Arguments {
  Inputs inputs{};
  Options options{};
  Outputs outputs{};
};

/// Fills in what is called, which has the arguments' addresses from then on.
template <typename Inputs, typename Options, typename Outputs, typename Size, typename Call>
Operation operation(const std::string& name, const Size& size, const Call& call,
                    const std::function<void(Operation&, Arguments<Inputs, Options, Outputs>&)>& fill) {
  Operation made{.name = name};
  const auto a = std::make_shared<Arguments<Inputs, Options, Outputs>>();
  fill(made, *a);
  made.workspace = [=](const Context& context) { return size(a->inputs, a->options, a->outputs, context); };
  made.call = [=](const Context& context) { call(a->inputs, a->options, a->outputs, context); };
  return made;
}

inline void add_attention_inputs(Operation& made, AttentionInputs& in) {
  made.add("q", in.q, {2, 4, 6, 8});
  made.add("k", in.k, {2, 2, 5, 8});
  made.add("v", in.v, {2, 2, 5, 8});
  made.add("mask", in.mask, {2, 1, 6, 5});
  made.add("alibi_slopes", in.alibi_slopes, {4});
  made.add("sinks", in.sinks, {4});
  made.add("logit_scale", in.logit_scale, {4});
  made.add("dropout_seed", in.dropout_seed, DType::i64, {2});
  made.add("key_lengths", in.key_lengths, DType::i32, {2});
  made.memory->back().fill(4);
  in.blocks = {.block_q = 3, .block_k = 2};
  made.add("blocks.counts", in.blocks.counts, DType::i32, {1, 1, 2});
  made.memory->back().fill(1);
  made.add("blocks.indices", in.blocks.indices, DType::i32, {1, 1, 2, 3});
  made.add("blocks.full_counts", in.blocks.full_counts, DType::i32, {1, 1, 2});
  made.memory->back().fill(1);
  made.add("blocks.full_indices", in.blocks.full_indices, DType::i32, {1, 1, 2, 3});
  made.memory->back().fill(1);
  made.add("blocks.tile_ids", in.blocks.tile_ids, DType::i32, {1, 1, 2, 3});
  made.add("blocks.tiles", in.blocks.tiles, DType::boolean, {1, 3, 2});
  made.memory->back().fill(1);
}

inline Operation attention_forward_operation() {
  return operation<AttentionInputs, AttentionOptions, AttentionOutputs>(
      "attention_forward", attention_forward_workspace, attention_forward, [](Operation& made, auto& a) {
        add_attention_inputs(made, a.inputs);
        made.add("o", a.outputs.o, {2, 4, 6, 8});
        made.add("lse", a.outputs.lse, {2, 4, 6});
      });
}

inline Operation attention_backward_operation() {
  return operation<AttentionInputs, AttentionOptions, AttentionGradients>(
      "attention_backward", attention_backward_workspace, attention_backward, [](Operation& made, auto& a) {
        add_attention_inputs(made, a.inputs);
        made.add("o", a.outputs.o, {2, 4, 6, 8});
        made.add("lse", a.outputs.lse, {2, 4, 6});
        made.add("d_o", a.outputs.d_o, {2, 4, 6, 8});
        made.add("d_lse", a.outputs.d_lse, {2, 4, 6});
        made.add("dq", a.outputs.dq, {2, 4, 6, 8});
        made.add("dk", a.outputs.dk, {2, 2, 5, 8});
        made.add("dv", a.outputs.dv, {2, 2, 5, 8});
        made.add("dmask", a.outputs.dmask, {2, 1, 6, 5});
        made.add("dsinks", a.outputs.dsinks, {4});
        made.add("dlogit_scale", a.outputs.dlogit_scale, {4});
      });
}

inline Operation packed_attention_operation() {
  return operation<AttentionInputs, AttentionOptions, AttentionOutputs>(
      "packed attention", attention_forward_workspace, attention_forward, [](Operation& made, auto& a) {
        made.add("q", a.inputs.q, {6, 4, 8});
        made.add("k", a.inputs.k, {5, 2, 8});
        made.add("v", a.inputs.v, {5, 2, 8});
        made.add("packed.cumulative_q", a.inputs.packed.cumulative_q, DType::i32, {3});
        made.memory->back().set_values(std::vector<double>{0, 2, 6});
        made.add("packed.cumulative_k", a.inputs.packed.cumulative_k, DType::i32, {3});
        made.memory->back().set_values(std::vector<double>{0, 4, 5});
        a.inputs.packed.max_length_q = a.inputs.packed.max_length_k = 4;
        made.add("o", a.outputs.o, {6, 4, 8});
      });
}

inline Operation paged_attention_operation() {
  return operation<AttentionInputs, AttentionOptions, AttentionOutputs>(
      "paged attention", attention_forward_workspace, attention_forward, [](Operation& made, auto& a) {
        made.add("q", a.inputs.q, {2, 4, 6, 8});
        made.add("k", a.inputs.k, {3, 2, 4, 8});
        made.add("v", a.inputs.v, {3, 2, 4, 8});
        made.add("page_table", a.inputs.page_table, DType::i32, {2, 2});
        made.add("key_lengths", a.inputs.key_lengths, DType::i32, {2});
        made.memory->back().fill(5);
        made.add("o", a.outputs.o, {2, 4, 6, 8});
      });
}

/// So few queries and so many keys that workers share the keys of one query.
inline Operation long_attention_operation() {
  return operation<AttentionInputs, AttentionOptions, AttentionOutputs>(
      "attention to many keys", attention_forward_workspace, attention_forward, [](Operation& made, auto& a) {
        made.add("q", a.inputs.q, {1, 1, 4, 8});
        made.add("k", a.inputs.k, {1, 1, 2100, 8});
        made.add("v", a.inputs.v, {1, 1, 2100, 8});
        Random rng(5);
        for (Buffer& buffer : *made.memory) buffer.fill_random(rng);
        made.add("o", a.outputs.o, {1, 1, 4, 8});
      });
}

inline Operation gemm_operation() {
  return operation<GemmInputs, GemmOptions, GemmOutputs>("gemm", gemm_workspace, gemm,
                                                         [](Operation& made, auto& a) {
                                                           a.options.activation = Activation::silu;
                                                           made.add("a", a.inputs.a, {6, 8});
                                                           made.add("b", a.inputs.b, {5, 8});
                                                           made.add("bias", a.inputs.bias, {5});
                                                           made.add("gate", a.inputs.gate, {5, 8});
                                                           made.add("gate_bias", a.inputs.gate_bias, {5});
                                                           made.add("residual", a.inputs.residual, {6, 5});
                                                           made.add("out", a.outputs.out, {6, 5});
                                                         });
}

inline void add_ffn_inputs(Operation& made, FfnInputs& in) {
  made.add("x", in.x, {6, 8});
  made.add("up", in.up, {10, 8});
  made.add("gate", in.gate, {10, 8});
  made.add("down", in.down, {7, 10});
  made.add("up_bias", in.up_bias, {10});
  made.add("gate_bias", in.gate_bias, {10});
  made.add("down_bias", in.down_bias, {7});
}

inline Operation ffn_forward_operation() {
  return operation<FfnInputs, FfnOptions, FfnOutputs>(
      "ffn_forward", ffn_forward_workspace, ffn_forward, [](Operation& made, auto& a) {
        add_ffn_inputs(made, a.inputs);
        made.add("residual", a.inputs.residual, {6, 7});
        made.add("out", a.outputs.out, {6, 7});
        made.add("up_product", a.outputs.up_product, {6, 10});
        made.add("gate_product", a.outputs.gate_product, {6, 10});
      });
}

inline Operation ffn_backward_operation() {
  return operation<FfnInputs, FfnOptions, FfnGradients>(
      "ffn_backward", ffn_backward_workspace, ffn_backward, [](Operation& made, auto& a) {
        add_ffn_inputs(made, a.inputs);
        made.add("d_out", a.outputs.d_out, {6, 7});
        made.add("dx", a.outputs.dx, {6, 8});
        made.add("d_up", a.outputs.d_up, {10, 8});
        made.add("d_gate", a.outputs.d_gate, {10, 8});
        made.add("d_down", a.outputs.d_down, {7, 10});
        made.add("d_up_bias", a.outputs.d_up_bias, {10});
        made.add("d_gate_bias", a.outputs.d_gate_bias, {10});
        made.add("d_down_bias", a.outputs.d_down_bias, {7});
        made.add("up_product", a.outputs.up_product, {6, 10});
        made.add("gate_product", a.outputs.gate_product, {6, 10});
      });
}

inline Operation norm_forward_operation() {
  return operation<NormInputs, NormOptions, NormOutputs>("norm_forward", norm_forward_workspace, norm_forward,
                                                         [](Operation& made, auto& a) {
                                                           a.options.norm = Norm::layer;
                                                           made.add("x", a.inputs.x, {6, 8});
                                                           made.add("residual", a.inputs.residual, {6, 8});
                                                           made.add("weight", a.inputs.weight, {8});
                                                           made.add("bias", a.inputs.bias, {8});
                                                           made.add("y", a.outputs.y, {6, 8});
                                                           made.add("sum", a.outputs.sum, {6, 8});
                                                           made.add("rstd", a.outputs.rstd, {6});
                                                           made.add("mean", a.outputs.mean, {6});
                                                         });
}

inline Operation norm_backward_operation() {
  return operation<NormInputs, NormOptions, NormGradients>("norm_backward", norm_backward_workspace,
                                                           norm_backward, [](Operation& made, auto& a) {
                                                             a.options.norm = Norm::layer;
                                                             made.add("x", a.inputs.x, {6, 8});
                                                             made.add("weight", a.inputs.weight, {8});
                                                             made.add("bias", a.inputs.bias, {8});
                                                             made.add("dy", a.outputs.dy, {6, 8});
                                                             made.add("d_sum", a.outputs.d_sum, {6, 8});
                                                             made.add("rstd", a.outputs.rstd, {6});
                                                             made.add("mean", a.outputs.mean, {6});
                                                             made.add("dx", a.outputs.dx, {6, 8});
                                                             made.add("d_weight", a.outputs.d_weight, {8});
                                                             made.add("d_bias", a.outputs.d_bias, {8});
                                                           });
}

inline Operation rope_operation() {
  return operation<RopeInputs, RopeOptions, RopeOutputs>(
      "rope", rope_workspace, rope, [](Operation& made, auto& a) {
        made.add("q", a.inputs.q, {2, 4, 3, 8});
        made.add("k", a.inputs.k, {2, 2, 3, 8});
        made.add("v", a.inputs.v, {2, 2, 3, 8});
        made.add("cos", a.inputs.cos, {9, 4});
        made.add("sin", a.inputs.sin, {9, 4});
        made.add("positions", a.inputs.positions, DType::i64, {2, 3});
        made.add("cache_starts", a.inputs.cache_starts, DType::i32, {2});
        made.add("page_table", a.inputs.page_table, DType::i32, {2, 2});
        made.memory->back().set_values(std::vector<double>{0, 1, 2, 3});
        made.add("q", a.outputs.q, {2, 4, 3, 8});
        made.add("k", a.outputs.k, {2, 2, 3, 8});
        made.add("k_cache", a.outputs.k_cache, {4, 2, 3, 8});
        made.add("v_cache", a.outputs.v_cache, {4, 2, 3, 8});
      });
}

/// With the angles of places in a dense cache.
inline Operation rope_to_ends_operation() {
  return operation<RopeInputs, RopeOptions, RopeOutputs>(
      "rope to cache_ends", rope_workspace, rope, [](Operation& made, auto& a) {
        made.add("k", a.inputs.k, {2, 2, 3, 8});
        made.add("cos", a.inputs.cos, {9, 4});
        made.add("sin", a.inputs.sin, {9, 4});
        made.add("cache_ends", a.inputs.cache_ends, DType::i32, {2});
        made.memory->back().set_values(std::vector<double>{3, 5});
        made.add("k_cache", a.outputs.k_cache, {2, 2, 5, 8});
      });
}

struct LayerArguments {
  LayerConfig config{.embed_dim = 8,
                     .heads_q = 2,
                     .heads_kv = 1,
                     .head_dim = 4,
                     .ffn_dim = 6,
                     .norm = Norm::layer,
                     .gated = true,
                     .activation = Activation::silu,
                     .causal = true,
                     .rotary = true};
  LayerWeights weights{};
  LayerInputs inputs{};
  LayerOptions options{};
  LayerOutputs outputs{};
  LayerGradients gradients{};
};

inline void add_layer_weights(Operation& made, LayerWeights& w, const std::string& prefix) {
  made.add(prefix + "weights.q", w.q, {8, 8});
  made.add(prefix + "weights.q_bias", w.q_bias, {8});
  made.add(prefix + "weights.k", w.k, {4, 8});
  made.add(prefix + "weights.k_bias", w.k_bias, {4});
  made.add(prefix + "weights.v", w.v, {4, 8});
  made.add(prefix + "weights.v_bias", w.v_bias, {4});
  made.add(prefix + "weights.out", w.out, {8, 8});
  made.add(prefix + "weights.out_bias", w.out_bias, {8});
  made.add(prefix + "weights.up", w.up, {6, 8});
  made.add(prefix + "weights.up_bias", w.up_bias, {6});
  made.add(prefix + "weights.gate", w.gate, {6, 8});
  made.add(prefix + "weights.gate_bias", w.gate_bias, {6});
  made.add(prefix + "weights.down", w.down, {8, 6});
  made.add(prefix + "weights.down_bias", w.down_bias, {8});
  made.add(prefix + "weights.attention_norm", w.attention_norm, {8});
  made.add(prefix + "weights.attention_norm_bias", w.attention_norm_bias, {8});
  made.add(prefix + "weights.ffn_norm", w.ffn_norm, {8});
  made.add(prefix + "weights.ffn_norm_bias", w.ffn_norm_bias, {8});
}

inline void add_layer_inputs(Operation& made, LayerArguments& a) {
  made.add("x", a.inputs.x, {2, 3, 8});
  made.add("cos", a.inputs.cos, {9, 2});
  made.add("sin", a.inputs.sin, {9, 2});
  made.add("positions", a.inputs.positions, DType::i64, {2, 3});
  add_layer_weights(made, a.weights, "");
}

/// With a paged cache.
inline Operation layer_forward_operation() {
  Operation made{.name = "layer_forward"};
  const auto a = std::make_shared<LayerArguments>();
  add_layer_inputs(made, *a);
  made.add("cache_starts", a->inputs.cache_starts, DType::i32, {2});
  made.add("key_lengths", a->inputs.key_lengths, DType::i32, {2});
  made.memory->back().fill(3);
  made.add("page_table", a->inputs.page_table, DType::i32, {2, 2});
  made.memory->back().set_values(std::vector<double>{0, 1, 2, 3});
  made.add("k_cache", a->inputs.k_cache, {4, 1, 3, 4});
  made.add("v_cache", a->inputs.v_cache, {4, 1, 3, 4});
  made.add("out", a->outputs.out, {2, 3, 8});
  made.workspace = [a](const Context& context) {
    return layer_workspace(a->config, a->weights, a->inputs, a->options, a->outputs, context);
  };
  made.call = [a](const Context& context) {
    layer_forward(a->config, a->weights, a->inputs, a->options, a->outputs, context);
  };
  return made;
}

inline Operation layer_backward_operation() {
  Operation made{.name = "layer_backward"};
  const auto a = std::make_shared<LayerArguments>();
  add_layer_inputs(made, *a);
  made.add("mask", a->inputs.mask, {2, 1, 3, 3});
  made.add("d_out", a->gradients.d_out, {2, 3, 8});
  made.add("dx", a->gradients.dx, {2, 3, 8});
  made.add("dmask", a->gradients.dmask, {2, 1, 3, 3});
  add_layer_weights(made, a->gradients.weights, "gradients.");
  made.workspace = [a](const Context& context) {
    return layer_backward_workspace(a->config, a->weights, a->inputs, a->options, a->gradients, context);
  };
  made.call = [a](const Context& context) {
    layer_backward(a->config, a->weights, a->inputs, a->options, a->gradients, context);
  };
  return made;
}

inline std::vector<Operation (*)()> every_operation() {
  return {attention_forward_operation,
          attention_backward_operation,
          packed_attention_operation,
          paged_attention_operation,
          long_attention_operation,
          gemm_operation,
          ffn_forward_operation,
          ffn_backward_operation,
          norm_forward_operation,
          norm_backward_operation,
          rope_operation,
          rope_to_ends_operation,
          layer_forward_operation,
          layer_backward_operation};
}

}  // namespace tilewise::test
