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
// memory: weights and caches belong to the caller, and intermediate results are in the workspace. On a GPU
// everything is launched on one stream and the host reads nothing, so a CUDA graph can capture a layer.

/// The shape of a layer and the variants of its operations.
struct LayerConfig {
  std::int64_t embed_dim = 0;  ///< E
  std::int64_t heads_q = 0;    ///< Hq
  std::int64_t heads_kv = 0;   ///< Hkv, a divisor of Hq
  std::int64_t head_dim = 0;   ///< D
  std::int64_t ffn_dim = 0;    ///< F
  Norm norm = Norm::rms;
  float epsilon = 1e-5f;
  /// Whether norms are applied before attention and network (Llama, ViT), or after the residual add (BERT).
  bool norm_first = true;
  bool gated = false;
  Activation activation = Activation::gelu;
  bool causal = false;
  bool rotary = false;
  RopePairs pairs = RopePairs::halves;
  friend bool operator==(const LayerConfig&, const LayerConfig&) = default;
};

/// The configuration of a known model: "vit-b/16", "bert-base", "llama-2-7b", "llama-2-13b", "llama-2-70b",
/// "llama-3-8b".
LayerConfig layer_config(std::string_view name);
/// The names that layer_config() knows.
std::vector<std::string_view> layer_configs();

/// Weights are [out, in], like those of torch's Linear, and have the type of x. Biases are optional; norms
/// have one only if they are layer norms. If the weights q, k and v are adjacent in memory, and so are their
/// biases, one product computes all three.
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
  /// The tables of the rotary embedding, as in rope.h; given if the configuration is rotary.
  Tensor cos{}, sin{}, positions{};
  Tensor mask{};  ///< as attention's; none with a cache
  /// A cache of keys and values, as in rope.h. The layer writes the new tokens to it, from cache_starts on,
  /// and attends to its first key_lengths (i32 [B]) tokens, which include the new ones.
  Tensor k_cache{}, v_cache{};
  Tensor cache_starts{}, key_lengths{}, page_table{};
};

struct LayerOptions {
  Precision precision = Precision::standard;
  std::size_t max_intermediate_bytes = 0;  ///< as in ffn.h
  bool deterministic = false;              ///< backward gives the same bits each time; forward always does
};

struct LayerOutputs {
  Tensor out{};  ///< [B, S, E], row-major; must not overlap x
};

/// What backward reads (d_out) and what it writes. It writes only the gradients for which tensors are given.
/// It reads no results of forward, and computes the intermediate results again from x.
struct LayerGradients {
  Tensor d_out{};          ///< [B, S, E], row-major
  Tensor dx{};             ///< likewise
  Tensor dmask{};          ///< as attention's
  LayerWeights weights{};  ///< shapes and types of the weights, row-major
};

/// All arguments are checked before anything is written. Backward takes no cache.
void layer_forward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerOutputs& outputs, const Context& context);

void layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                    const LayerOptions& options, const LayerGradients& gradients, const Context& context);

/// The bytes of workspace that the call needs.
std::size_t layer_workspace(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                            const LayerOptions& options, const LayerOutputs& outputs, const Context& context);

std::size_t layer_backward_workspace(const LayerConfig& config, const LayerWeights& weights,
                                     const LayerInputs& inputs, const LayerOptions& options,
                                     const LayerGradients& gradients, const Context& context);

/// One explanation for each operation, in the order in which they run.
std::vector<Explanation> explain_layer(const LayerConfig& config, const LayerWeights& weights,
                                       const LayerInputs& inputs, const LayerOptions& options,
                                       const LayerOutputs& outputs, const Context& context);
std::vector<Explanation> explain_layer_backward(const LayerConfig& config, const LayerWeights& weights,
                                                const LayerInputs& inputs, const LayerOptions& options,
                                                const LayerGradients& gradients, const Context& context);

}  // namespace tilewise
#pragma GCC visibility pop
