#include "tilewise/layer.h"

#include <algorithm>
#include <array>

#include "core/arena.h"
#include "core/kernel_list.h"
#include "layer/validate.h"
#include "tilewise/attention.h"
#include "tilewise/ffn.h"
#include "tilewise/gemm.h"

namespace tilewise {
namespace {

// What stands between the operations; tokens are M = B·S.
struct Buffers {
  Tensor normal;   // [M, E]
  Tensor q, k, v;  // [M, H·D], columns of one matrix
  Tensor heads;    // [M, Hq·D]: the output of attention
};

// `count` columns of a matrix from `first` on.
Tensor columns_of(const Tensor& matrix, std::int64_t first, std::int64_t count) {
  auto* data =
      static_cast<std::byte*>(matrix.data) + first * static_cast<std::int64_t>(size_of(matrix.dtype));
  return Tensor(data, matrix.dtype, std::array{matrix.extent(0), count},
                std::array{matrix.stride(0), std::int64_t{1}}, matrix.device);
}

Buffers take_buffers(Arena& arena, const LayerConfig& config, const Tensor& x) {
  const std::int64_t tokens = x.extent(0) * x.extent(1);
  const auto take = [&](std::int64_t columns) {
    auto* data = arena.take<std::byte>(tokens * columns * static_cast<std::int64_t>(size_of(x.dtype)));
    return Tensor(data, x.dtype, std::array{tokens, columns}, x.device);
  };
  const std::int64_t queries = config.heads_q * config.head_dim, keys = config.heads_kv * config.head_dim;
  const Tensor normal = take(config.embed_dim);
  const Tensor qkv = take(queries + 2 * keys);
  return {.normal = normal,
          .q = columns_of(qkv, 0, queries),
          .k = columns_of(qkv, queries, keys),
          .v = columns_of(qkv, queries + keys, keys),
          .heads = take(queries)};
}

// [B, S, E] as [M, E].
Tensor rows_of(const Tensor& tensor) {
  return Tensor(tensor.data, tensor.dtype, std::array{tensor.extent(0) * tensor.extent(1), tensor.extent(2)},
                tensor.device);
}

// [M, H·D] as [B, H, S, D].
Tensor heads_of(const Tensor& rows, const Tensor& x, std::int64_t dim) {
  const std::int64_t stride = rows.stride(0), length = x.extent(1);
  return Tensor(rows.data, rows.dtype, std::array{x.extent(0), rows.extent(1) / dim, length, dim},
                std::array{length * stride, dim, stride, std::int64_t{1}}, rows.device);
}

// Tensors that lie together in memory as one, along their first dimension; none where they do not.
Tensor joint(const Tensor& a, const Tensor& b, const Tensor& c) {
  Tensor whole = a;
  for (const Tensor* next : {&b, &c}) {
    if (!next->given() || !whole.given() || next->rank != whole.rank || next->dtype != whole.dtype) return {};
    for (int dim = 0; dim < whole.rank; ++dim) {
      if (next->stride(dim) != whole.stride(dim)) return {};
    }
    const std::int64_t elements = whole.extent(0) * whole.stride(0);
    if (next->data !=
        static_cast<std::byte*>(whole.data) + elements * static_cast<std::int64_t>(size_of(whole.dtype))) {
      return {};
    }
    whole.shape[0] += next->extent(0);
  }
  return whole;
}

// Calls the visitor for each operation of the layer in turn: what is launched, measured and explained is the
// same walk.
template <typename Visitor>
void walk(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
          const LayerOptions& options, const Tensor& out, const Buffers& buffers, Visitor& visitor) {
  const Tensor x = rows_of(inputs.x);
  const Tensor result = rows_of(out);
  const bool cached = inputs.k_cache.given();

  const auto norm = [&](const Tensor& from, const Tensor& weight, const Tensor& bias, const Tensor& to) {
    visitor(NormInputs{.x = from, .weight = weight, .bias = bias},
            NormOptions{.norm = config.norm, .epsilon = config.epsilon}, NormOutputs{.y = to});
  };
  const auto project = [&](const Tensor& from, const Tensor& weight, const Tensor& bias, const Tensor& to,
                           const Tensor& residual = {}) {
    visitor(GemmInputs{.a = from, .b = weight, .bias = bias, .residual = residual},
            GemmOptions{.precision = options.precision}, GemmOutputs{to});
  };
  const auto network = [&](const Tensor& from, const Tensor& residual, const Tensor& to) {
    visitor(FfnInputs{.x = from,
                      .up = weights.up,
                      .gate = weights.gate,
                      .down = weights.down,
                      .up_bias = weights.up_bias,
                      .gate_bias = weights.gate_bias,
                      .down_bias = weights.down_bias,
                      .residual = residual},
            FfnOptions{.activation = config.activation,
                       .max_intermediate_bytes = options.max_intermediate_bytes,
                       .precision = options.precision},
            FfnOutputs{to});
  };

  const Tensor attended = config.norm_first ? buffers.normal : x;
  if (config.norm_first) norm(x, weights.attention_norm, weights.attention_norm_bias, buffers.normal);
  const Tensor weight = joint(weights.q, weights.k, weights.v);
  const Tensor bias = joint(weights.q_bias, weights.k_bias, weights.v_bias);
  const bool any_bias = weights.q_bias.given() || weights.k_bias.given() || weights.v_bias.given();
  if (weight.given() && bias.given() == any_bias) {
    Tensor qkv = buffers.q;
    qkv.shape[1] = weight.extent(0);
    project(attended, weight, bias, qkv);
  } else {
    project(attended, weights.q, weights.q_bias, buffers.q);
    project(attended, weights.k, weights.k_bias, buffers.k);
    project(attended, weights.v, weights.v_bias, buffers.v);
  }

  const Tensor q = heads_of(buffers.q, inputs.x, config.head_dim);
  const Tensor k = heads_of(buffers.k, inputs.x, config.head_dim);
  const Tensor v = heads_of(buffers.v, inputs.x, config.head_dim);
  if (config.rotary || cached) {
    // Without a rotary embedding it turns nothing, and only writes the cache.
    const Tensor no_angles(nullptr, DType::f32, std::array{inputs.x.extent(1), std::int64_t{0}}, x.device);
    RopeInputs turn{.q = q,
                    .k = k,
                    .cos = config.rotary ? inputs.cos : no_angles,
                    .sin = config.rotary ? inputs.sin : no_angles,
                    .positions = config.rotary ? inputs.positions : Tensor()};
    RopeOutputs turned{.q = q};
    if (cached) {
      turn.v = v;
      turn.cache_starts = inputs.cache_starts;
      turn.page_table = inputs.page_table;
      turned.k_cache = inputs.k_cache;
      turned.v_cache = inputs.v_cache;
    } else {
      turned.k = k;
    }
    visitor(turn, RopeOptions{.pairs = config.pairs}, turned);
  }
  visitor(AttentionInputs{.q = q,
                          .k = cached ? inputs.k_cache : k,
                          .v = cached ? inputs.v_cache : v,
                          .mask = inputs.mask,
                          .key_lengths = inputs.key_lengths,
                          .page_table = inputs.page_table},
          AttentionOptions{.causal = config.causal,
                           .alignment = cached ? Alignment::bottom_right : Alignment::top_left,
                           .precision = options.precision},
          AttentionOutputs{.o = heads_of(buffers.heads, inputs.x, config.head_dim)});
  project(buffers.heads, weights.out, weights.out_bias, result, x);

  if (config.norm_first) {
    norm(result, weights.ffn_norm, weights.ffn_norm_bias, buffers.normal);
    network(buffers.normal, result, result);
  } else {
    norm(result, weights.attention_norm, weights.attention_norm_bias, result);
    network(result, result, buffers.normal);
    norm(buffers.normal, weights.ffn_norm, weights.ffn_norm_bias, result);
  }
}

// The most that any of the operations needs.
struct Measure {
  const Context& context;
  std::size_t bytes = 0;

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    bytes = std::max(bytes, norm_forward_workspace(i, o, to, context));
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    bytes = std::max(bytes, gemm_workspace(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    bytes = std::max(bytes, ffn_forward_workspace(i, o, to, context));
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    bytes = std::max(bytes, rope_workspace(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    bytes = std::max(bytes, attention_forward_workspace(i, o, to, context));
  }
};

struct Launch {
  const Context& context;

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    norm_forward(i, o, to, context);
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    gemm(i, o, to, context);
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    ffn_forward(i, o, to, context);
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    rope(i, o, to, context);
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    attention_forward(i, o, to, context);
  }
};

struct Explain {
  const Context& context;
  std::vector<Explanation> found{};

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    found.push_back(explain_norm_forward(i, o, to, context));
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    found.push_back(explain_gemm(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    found.push_back(explain_ffn_forward(i, o, to, context));
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    found.push_back(explain_rope(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    found.push_back(explain_attention_forward(i, o, to, context));
  }
};

// Where there is no workspace yet, buffers stand at an address that is aligned as it will be, and where no
// memory can be.
constexpr std::uintptr_t absent_address = std::uintptr_t{1} << 60;

Buffers absent_buffers(const LayerConfig& config, const Tensor& x, std::size_t& used) {
  Arena arena(reinterpret_cast<void*>(absent_address));
  const Buffers buffers = take_buffers(arena, config, x);
  used = arena.rounded();
  return buffers;
}

}  // namespace

void layer_forward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerOutputs& outputs, const Context& context) {
  const std::size_t needed = layer_workspace(config, weights, inputs, options, outputs, context);
  Context inner = with_aligned_workspace(context, needed);
  Arena arena(inner.workspace.data);
  const Buffers buffers = take_buffers(arena, config, inputs.x);
  inner.workspace.data = static_cast<std::byte*>(inner.workspace.data) + arena.rounded();
  inner.workspace.bytes -= arena.rounded();
  Launch launch{inner};
  walk(config, weights, inputs, options, outputs.out, buffers, launch);
}

std::size_t layer_workspace(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                            const LayerOptions& options, const LayerOutputs& outputs,
                            const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  std::size_t used = 0;
  const Buffers buffers = absent_buffers(config, inputs.x, used);
  Measure measure{context};
  walk(config, weights, inputs, options, outputs.out, buffers, measure);
  return used + measure.bytes + workspace_alignment - 1;
}

std::vector<Explanation> explain_layer(const LayerConfig& config, const LayerWeights& weights,
                                       const LayerInputs& inputs, const LayerOptions& options,
                                       const LayerOutputs& outputs, const Context& context) {
  check_layer(config, weights, inputs, outputs, context);
  std::size_t used = 0;
  const Buffers buffers = absent_buffers(config, inputs.x, used);
  Explain explain{context};
  walk(config, weights, inputs, options, outputs.out, buffers, explain);
  return explain.found;
}

}  // namespace tilewise
