#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tilewise/activation.h"
#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/norm.h"
#include "tilewise/rope.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// A transformer layer: attention and a feed-forward network, each with its norm and its residual. It owns no
// memory: weights and caches are the caller's, and everything between stands in the workspace. On a GPU all
// of it is launched on one stream, without a read by the host, so that it captures into a CUDA graph.

/// What a layer is made of.
struct LayerConfig {
  std::int64_t embed_dim = 0;  ///< E
  std::int64_t heads_q = 0;    ///< Hq
  std::int64_t heads_kv = 0;   ///< Hkv, a divisor of Hq
  std::int64_t head_dim = 0;   ///< D
  std::int64_t ffn_dim = 0;    ///< F
  Norm norm = Norm::rms;
  float epsilon = 1e-5f;
  /// Whether norms stand before attention and network (Llama, ViT), or after the residual add (BERT).
  bool norm_first = true;
  bool gated = false;
  Activation activation = Activation::gelu;
  bool causal = false;
  bool rotary = false;
  RopePairs pairs = RopePairs::halves;
  friend bool operator==(const LayerConfig&, const LayerConfig&) = default;
};

/// Of a known model: "vit-b/16", "bert-base", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b".
LayerConfig layer_config(std::string_view name);
std::vector<std::string_view> layer_configs();

/// Weights lie as torch's Linear has them, [out, in], all in the type of x. Biases are optional; those of
/// norms belong to layer norms. Where q, k and v lie one behind the other in memory, and their biases do, one
/// product makes all three.
struct LayerWeights {
  Tensor q{}, q_bias{};      ///< [Hq·D, E], [Hq·D]
  Tensor k{}, k_bias{};      ///< [Hkv·D, E]
  Tensor v{}, v_bias{};      ///< [Hkv·D, E]
  Tensor out{}, out_bias{};  ///< [E, Hq·D], [E]
  Tensor up{}, up_bias{};    ///< [F, E], [F]
  Tensor gate{}, gate_bias{};
  Tensor down{}, down_bias{};                      ///< [E, F], [E]
  Tensor attention_norm{}, attention_norm_bias{};  ///< [E], or f32
  Tensor ffn_norm{}, ffn_norm_bias{};
};

struct LayerInputs {
  Tensor x{};  ///< [B, S, E], row-major
  /// The rotary embedding's, as in rope.h; given where the configuration has one.
  Tensor cos{}, sin{}, positions{};
  Tensor mask{};  ///< as attention's; none with a cache
  /// A cache of keys and values to write to and to attend to, as in rope.h: with it, cache_starts says where
  /// the new tokens go, and key_lengths i32 [B] how many there are then.
  Tensor k_cache{}, v_cache{};
  Tensor cache_starts{}, key_lengths{}, page_table{};
};

struct LayerOptions {
  Precision precision = Precision::standard;
  std::size_t max_intermediate_bytes = 0;  ///< as in ffn.h
  bool deterministic = false;              ///< backward bitwise repeatable; forward always is
};

struct LayerOutputs {
  Tensor out{};  ///< [B, S, E], row-major; apart from x
};

/// What backward reads (d_out) and what it writes. Only the gradients given are written. Nothing is kept from
/// forward: what stands between is computed anew from x.
struct LayerGradients {
  Tensor d_out{};          ///< [B, S, E], row-major
  Tensor dx{};             ///< likewise
  Tensor dmask{};          ///< as attention's
  LayerWeights weights{};  ///< of the shapes and types of the weights, by rows
};

/// Every argument of the layer is checked before anything is written. Backward takes no cache.
void layer_forward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerOutputs& outputs, const Context& context);

void layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                    const LayerOptions& options, const LayerGradients& gradients, const Context& context);

/// Bytes of workspace the call will need.
std::size_t layer_workspace(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                            const LayerOptions& options, const LayerOutputs& outputs, const Context& context);

std::size_t layer_backward_workspace(const LayerConfig& config, const LayerWeights& weights,
                                     const LayerInputs& inputs, const LayerOptions& options,
                                     const LayerGradients& gradients, const Context& context);

/// One for each operation, in order.
std::vector<Explanation> explain_layer(const LayerConfig& config, const LayerWeights& weights,
                                       const LayerInputs& inputs, const LayerOptions& options,
                                       const LayerOutputs& outputs, const Context& context);
std::vector<Explanation> explain_layer_backward(const LayerConfig& config, const LayerWeights& weights,
                                                const LayerInputs& inputs, const LayerOptions& options,
                                                const LayerGradients& gradients, const Context& context);

}  // namespace tilewise
#pragma GCC visibility pop
