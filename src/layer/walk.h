#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/kernel_list.h"
#include "layer/joint.h"
#include "layer/visitors.h"
#include "tilewise/layer.h"

namespace tilewise {

/// [B, S, E] as [M, E], tokens being M = B·S.
inline Tensor rows_of(const Tensor& tensor) {
  return Tensor(tensor.data, tensor.dtype, std::array{tensor.extent(0) * tensor.extent(1), tensor.extent(2)},
                tensor.device);
}

/// [M, H·D] as [B, H, S, D].
inline Tensor heads_of(const Tensor& rows, const Tensor& x, std::int64_t dim) {
  const std::int64_t stride = rows.stride(0), length = x.extent(1);
  return Tensor(rows.data, rows.dtype, std::array{x.extent(0), rows.extent(1) / dim, length, dim},
                std::array{length * stride, dim, stride, std::int64_t{1}}, rows.device);
}

/// Takes rows of tokens from an arena, in the type of x.
struct TakeRows {
  Arena& arena;
  const Tensor& x;

  Tensor operator()(std::int64_t columns) const {
    const std::int64_t tokens = x.extent(0) * x.extent(1);
    auto* data = arena.take<std::byte>(tokens, columns, size_of(x.dtype));
    return Tensor(data, x.dtype, std::array{tokens, columns}, x.device);
  }
};

/// Where there is no workspace yet, what would stand in it stands at an address that is aligned as it will
/// be, and where no memory can be.
inline Arena absent_arena() {
  constexpr std::uintptr_t address = std::uintptr_t{1} << 60;
  return Arena(reinterpret_cast<void*>(address));
}

/// A pass over a layer: `take_places(arena)` lays out what stands between the operations, `walk(places,
/// visitor)` goes over them.
template <typename TakePlaces, typename WalkSteps>
struct LayerPass {
  TakePlaces take_places;
  WalkSteps walk;

  std::size_t workspace(const Context& context) const {
    Arena arena = absent_arena();
    PlannedSteps steps(context);
    walk(take_places(arena), steps);
    steps.check(context);
    return needed(arena, steps);
  }

  /// Plans all operations in the workspace where they will run; then nothing is left to check, and they run.
  void run(const Context& context) const {
    Arena counted = absent_arena();
    take_places(counted);
    Arena arena = arena_in(context.workspace, counted.rounded());
    PlannedSteps steps(context);
    walk(take_places(arena), steps);
    steps.check(context);
    Context inner = with_aligned_workspace(context, needed(arena, steps));
    inner.workspace.data = static_cast<std::byte*>(inner.workspace.data) + arena.rounded();
    inner.workspace.bytes -= arena.rounded();
    steps.launch(inner);
  }

  /// Refuses what the call refuses, in its words: of several errors the call finds those of arguments first,
  /// and then those of what index tensors hold. That no kernel takes an operation is for it to tell.
  std::vector<Explanation> explain(const Context& context) const {
    try {
      workspace(context);
    } catch (const Unsupported&) {
    }
    Arena arena = absent_arena();
    Explain explanations{context};
    walk(take_places(arena), explanations);
    return explanations.found;
  }

 private:
  static std::size_t needed(Arena arena, const PlannedSteps& steps) {
    arena.take<std::byte>(steps.workspace_bytes());
    return arena.used() + workspace_alignment - 1;
  }
  /// In a workspace that is too small there is nothing; the pass then ends with an error.
  static Arena arena_in(const Workspace& workspace, std::size_t bytes) {
    const std::uintptr_t padding = -reinterpret_cast<std::uintptr_t>(workspace.data) % workspace_alignment;
    if (workspace.data == nullptr || workspace.bytes < padding + bytes) return absent_arena();
    return Arena(static_cast<std::byte*>(workspace.data) + padding);
  }
};
template <typename TakePlaces, typename WalkSteps>
LayerPass(TakePlaces, WalkSteps) -> LayerPass<TakePlaces, WalkSteps>;

/// What a norm leaves for its backward.
struct Statistics {
  Tensor rstd{}, mean{};
};

/// What stands between the operations. Forward gives one memory to several of them, and has no statistics.
struct Places {
  Tensor attended{};      ///< [M, E]: what q, k and v are made of
  Tensor q{}, k{}, v{};   ///< [M, H·D]
  Tensor heads{}, lse{};  ///< [M, Hq·D] and [B, Hq, S]: the output of attention
  Tensor middle{};        ///< [M, E]: x and what attention adds to it
  Tensor normal{};        ///< [M, E]: what the network takes
  Tensor sum{};           ///< [M, E]: `normal` and what the network adds to it, where norms come after
  Statistics attention_norm{}, ffn_norm{};
};

/// The operations of a layer, each handed to the visitor.
template <typename Visitor>
struct Walk {
  const LayerConfig& config;
  const LayerWeights& weights;
  const LayerInputs& inputs;
  const LayerOptions& options;
  Visitor& visit;

  NormOptions norm_options() const { return {.norm = config.norm, .epsilon = config.epsilon}; }
  NormInputs attention_norm_of(const Tensor& x) const {
    return {.x = x, .weight = weights.attention_norm, .bias = weights.attention_norm_bias};
  }
  NormInputs ffn_norm_of(const Tensor& x) const {
    return {.x = x, .weight = weights.ffn_norm, .bias = weights.ffn_norm_bias};
  }
  void norm(const NormInputs& from, const Tensor& to, const Statistics& statistics) const {
    visit(from, norm_options(), NormOutputs{.y = to, .rstd = statistics.rstd, .mean = statistics.mean});
  }

  void project(const Tensor& from, const Tensor& weight, const Tensor& bias, const Tensor& to,
               const Tensor& residual = {}) const {
    visit(GemmInputs{.a = from, .b = weight, .bias = bias, .residual = residual},
          GemmOptions{.precision = options.precision}, GemmOutputs{to});
  }

  /// Queries, keys and values: one product where weights, biases and results lie together.
  void project_heads(const Places& at) const {
    const LayerWeights& w = weights;
    const Tensor weight = joint(0, w.q, w.k, w.v), bias = joint(0, w.q_bias, w.k_bias, w.v_bias);
    const Tensor result = joint(1, at.q, at.k, at.v);
    const bool any_bias = w.q_bias.given() || w.k_bias.given() || w.v_bias.given();
    if (weight.given() && result.given() && bias.given() == any_bias) {
      return project(at.attended, weight, bias, result);
    }
    project(at.attended, w.q, w.q_bias, at.q);
    project(at.attended, w.k, w.k_bias, at.k);
    project(at.attended, w.v, w.v_bias, at.v);
  }

  FfnInputs network_of(const Tensor& x) const {
    return {.x = x,
            .up = weights.up,
            .gate = weights.gate,
            .down = weights.down,
            .up_bias = weights.up_bias,
            .gate_bias = weights.gate_bias,
            .down_bias = weights.down_bias};
  }
  FfnOptions network_options() const {
    return {.activation = config.activation,
            .max_intermediate_bytes = options.max_intermediate_bytes,
            .precision = options.precision};
  }
  void network(const Tensor& from, const Tensor& residual, const Tensor& to) const {
    FfnInputs network = network_of(from);
    network.residual = residual;
    visit(network, network_options(), FfnOutputs{to});
  }

  bool cached() const { return inputs.k_cache.given(); }
  Tensor by_heads(const Tensor& rows) const { return heads_of(rows, inputs.x, config.head_dim); }

  /// Turns q and k, in place or into the cache.
  void turn(const Places& at) const {
    // Without a rotary embedding it turns nothing, and only writes the cache.
    const Tensor no_angles(nullptr, DType::f32, std::array{inputs.x.extent(1), std::int64_t{0}},
                           inputs.x.device);
    RopeInputs from{.q = by_heads(at.q),
                    .k = by_heads(at.k),
                    .cos = config.rotary ? inputs.cos : no_angles,
                    .sin = config.rotary ? inputs.sin : no_angles,
                    .positions = config.rotary ? inputs.positions : Tensor()};
    RopeOutputs to{.q = from.q};
    if (cached()) {
      from.v = by_heads(at.v);
      from.cache_starts = inputs.cache_starts;
      from.page_table = inputs.page_table;
      to.k_cache = inputs.k_cache;
      to.v_cache = inputs.v_cache;
    } else {
      to.k = from.k;
    }
    visit(from, RopeOptions{.pairs = config.pairs}, to);
  }

  AttentionInputs attention_of(const Places& at) const {
    return {.q = by_heads(at.q),
            .k = cached() ? inputs.k_cache : by_heads(at.k),
            .v = cached() ? inputs.v_cache : by_heads(at.v),
            .mask = inputs.mask,
            .key_lengths = inputs.key_lengths,
            .page_table = inputs.page_table};
  }
  AttentionOptions attention_options() const {
    return {.causal = config.causal,
            .alignment = cached() ? Alignment::bottom_right : Alignment::top_left,
            .deterministic = options.deterministic,
            .precision = options.precision};
  }

  /// From x up to what the network takes.
  void up_to_network(const Places& at) const {
    const Tensor x = rows_of(inputs.x);
    if (config.norm_first) norm(attention_norm_of(x), at.attended, at.attention_norm);
    project_heads(at);
    if (config.rotary || cached()) turn(at);
    visit(attention_of(at), attention_options(), AttentionOutputs{.o = by_heads(at.heads), .lse = at.lse});
    project(at.heads, weights.out, weights.out_bias, at.middle, x);
    if (config.norm_first) {
      norm(ffn_norm_of(at.middle), at.normal, at.ffn_norm);
    } else {
      norm(attention_norm_of(at.middle), at.normal, at.attention_norm);
    }
  }
};

}  // namespace tilewise
