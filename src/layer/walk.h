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

/// An arena for planning before there is a workspace. Its address is aligned as the workspace will be, and no
/// memory can be there.
inline Arena absent_arena() {
  constexpr std::uintptr_t address = std::uintptr_t{1} << 60;
  return Arena(reinterpret_cast<void*>(address));
}

/// A pass over a layer: `take_tensors(arena)` lays out the tensors between the operations, `walk(tensors,
/// visitor)` hands each operation to the visitor in order.
template <typename TakeTensors, typename WalkSteps>
struct LayerPass {
  TakeTensors take_tensors;
  WalkSteps walk;

  std::size_t workspace(const Context& context) const {
    Arena arena = absent_arena();
    PlannedSteps steps(context);
    walk(take_tensors(arena), steps);
    steps.check(context);
    return needed(arena, steps);
  }

  /// Plans all operations in the workspace where they will run; then nothing is left to check, and they run.
  void run(const Context& context) const {
    Arena counted = absent_arena();
    take_tensors(counted);
    Arena arena = arena_in(context.workspace, counted.rounded());
    PlannedSteps steps(context);
    walk(take_tensors(arena), steps);
    steps.check(context);
    Context inner = with_aligned_workspace(context, needed(arena, steps));
    inner.workspace.data = static_cast<std::byte*>(inner.workspace.data) + arena.rounded();
    inner.workspace.bytes -= arena.rounded();
    steps.launch(inner);
  }

  /// Throws for wrong arguments as the call itself does: workspace() finds errors of arguments first, and
  /// then those of index tensors. If no kernel takes an operation, the explanations say so.
  std::vector<Explanation> explain(const Context& context) const {
    try {
      workspace(context);
    } catch (const Unsupported&) {
    }
    Arena arena = absent_arena();
    Explain explanations{context};
    walk(take_tensors(arena), explanations);
    return explanations.found;
  }

 private:
  static std::size_t needed(Arena arena, const PlannedSteps& steps) {
    arena.take<std::byte>(steps.workspace_bytes());
    return arena.used() + workspace_alignment - 1;
  }
  /// If the workspace is too small nothing is laid out in it; the pass then ends with an error.
  static Arena arena_in(const Workspace& workspace, std::size_t bytes) {
    const std::uintptr_t padding = -reinterpret_cast<std::uintptr_t>(workspace.data) % workspace_alignment;
    if (workspace.data == nullptr || workspace.bytes < padding + bytes) return absent_arena();
    return Arena(static_cast<std::byte*>(workspace.data) + padding);
  }
};
template <typename TakeTensors, typename WalkSteps>
LayerPass(TakeTensors, WalkSteps) -> LayerPass<TakeTensors, WalkSteps>;

/// What a norm's forward stores for its backward.
struct Statistics {
  Tensor rstd{}, mean{};
};

/// The tensors between the operations. Forward uses the same memory for several of them, and has no
/// statistics.
struct LayerTensors {
  Tensor attention_input{};       ///< [M, E]: the input of the projections to q, k and v
  Tensor q{}, k{}, v{};           ///< [M, H·D]
  Tensor attention_out{}, lse{};  ///< [M, Hq·D] and [B, Hq, S]
  Tensor after_attention{};       ///< [M, E]: x plus the output projection of attention
  Tensor ffn_input{};             ///< [M, E]: the input of the feed-forward network
  Tensor sum{};                   ///< [M, E]: `ffn_input` plus the network's output, if not norm_first
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

  /// Projects to q, k and v: by one GEMM if their weights, biases and results are contiguous.
  void project_heads(const LayerTensors& at) const {
    const LayerWeights& w = weights;
    const Tensor weight = joint(0, w.q, w.k, w.v), bias = joint(0, w.q_bias, w.k_bias, w.v_bias);
    const Tensor result = joint(1, at.q, at.k, at.v);
    const bool any_bias = w.q_bias.given() || w.k_bias.given() || w.v_bias.given();
    if (weight.given() && result.given() && bias.given() == any_bias) {
      return project(at.attention_input, weight, bias, result);
    }
    project(at.attention_input, w.q, w.q_bias, at.q);
    project(at.attention_input, w.k, w.k_bias, at.k);
    project(at.attention_input, w.v, w.v_bias, at.v);
  }

  FfnInputs ffn_inputs(const Tensor& x) const {
    return {.x = x,
            .up = weights.up,
            .gate = weights.gate,
            .down = weights.down,
            .up_bias = weights.up_bias,
            .gate_bias = weights.gate_bias,
            .down_bias = weights.down_bias};
  }
  FfnOptions ffn_options() const {
    return {.activation = config.activation,
            .max_intermediate_bytes = options.max_intermediate_bytes,
            .precision = options.precision};
  }
  void ffn(const Tensor& from, const Tensor& residual, const Tensor& to) const {
    FfnInputs with_residual = ffn_inputs(from);
    with_residual.residual = residual;
    visit(with_residual, ffn_options(), FfnOutputs{to});
  }

  bool cached() const { return inputs.k_cache.given(); }
  Tensor by_heads(const Tensor& rows) const { return heads_of(rows, inputs.x, config.head_dim); }

  /// Applies the rotary embedding to q and k, in place; with a cache, k and v are written to the cache.
  void rotate(const LayerTensors& at) const {
    // Without a rotary embedding no dims are rotated; the operation only writes the cache.
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

  AttentionInputs attention_of(const LayerTensors& at) const {
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

  /// From x up to the input of the feed-forward network.
  void up_to_ffn(const LayerTensors& at) const {
    const Tensor x = rows_of(inputs.x);
    if (config.norm_first) norm(attention_norm_of(x), at.attention_input, at.attention_norm);
    project_heads(at);
    if (config.rotary || cached()) rotate(at);
    visit(attention_of(at), attention_options(),
          AttentionOutputs{.o = by_heads(at.attention_out), .lse = at.lse});
    project(at.attention_out, weights.out, weights.out_bias, at.after_attention, x);
    if (config.norm_first) {
      norm(ffn_norm_of(at.after_attention), at.ffn_input, at.ffn_norm);
    } else {
      norm(attention_norm_of(at.after_attention), at.ffn_input, at.attention_norm);
    }
  }
};

}  // namespace tilewise
