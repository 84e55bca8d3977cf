#include "layer/validate.h"
#include "layer/walk.h"

namespace tilewise {
namespace {

// The tensors that backward computes again, and the gradients between the operations.
struct BackwardTensors : LayerTensors {
  Tensor d_sum;              // [M, E]: of `sum`, if not norm_first
  Tensor d_ffn_input;        // [M, E]: of `ffn_input`, later of `attention_input`
  Tensor d_after_attention;  // [M, E]
  Tensor d_attention_out;    // [M, Hq·D]
  Tensor dq, dk, dv;
};

BackwardTensors take_tensors(Arena& arena, const LayerConfig& config, const LayerInputs& inputs) {
  const Tensor& x = inputs.x;
  const TakeRows take{arena, x};
  const DType statistics = x.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto take_one_each = [&](auto... extents) {
    auto* data = arena.take<std::byte>(extents..., size_of(statistics));
    return Tensor(data, statistics, std::array{extents...}, x.device);
  };
  const auto take_statistics = [&] {
    const std::int64_t tokens = x.extent(0) * x.extent(1);
    const Tensor rstd = take_one_each(tokens);
    return Statistics{rstd, config.norm == Norm::layer ? take_one_each(tokens) : Tensor()};
  };
  const std::int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  BackwardTensors at;
  at.attention_input = config.norm_first ? take(config.embed_dim) : rows_of(x);
  at.q = take(width_q);
  at.k = take(width_kv);
  at.v = take(width_kv);
  at.attention_out = take(width_q);
  at.lse = take_one_each(x.extent(0), config.heads_q, x.extent(1));
  at.after_attention = take(config.embed_dim);
  at.ffn_input = take(config.embed_dim);
  at.attention_norm = take_statistics();
  at.ffn_norm = take_statistics();
  at.d_ffn_input = take(config.embed_dim);
  at.d_after_attention = take(config.embed_dim);
  if (!config.norm_first) {
    at.sum = take(config.embed_dim);
    at.d_sum = take(config.embed_dim);
  }
  at.d_attention_out = take(width_q);
  at.dq = take(width_q);
  at.dk = take(width_kv);
  at.dv = take(width_kv);
  return at;
}

Tensor transposed(const Tensor& matrix) {
  return Tensor(matrix.data, matrix.dtype, std::array{matrix.extent(1), matrix.extent(0)},
                std::array{matrix.stride(1), matrix.stride(0)}, matrix.device);
}

template <typename Visitor>
class Backward {
 public:
  Backward(const Walk<Visitor>& walk, const LayerGradients& gradients, const BackwardTensors& at)
      : walk_(walk), to_(gradients), at_(at) {}

  void run() const {
    walk_.up_to_ffn(at_);
    const Tensor d_out = rows_of(to_.d_out);
    const LayerWeights& d_weights = to_.weights;
    if (walk_.config.norm_first) {
      ffn(d_out);
      norm(walk_.ffn_norm_of(at_.after_attention), at_.ffn_norm, at_.d_ffn_input, d_out,
           at_.d_after_attention, d_weights.ffn_norm, d_weights.ffn_norm_bias);
    } else {
      walk_.ffn(at_.ffn_input, at_.ffn_input, at_.sum);
      // Only the statistics are needed; d_sum receives the result and is overwritten by the gradient.
      walk_.norm(walk_.ffn_norm_of(at_.sum), at_.d_sum, at_.ffn_norm);
      norm(walk_.ffn_norm_of(at_.sum), at_.ffn_norm, d_out, {}, at_.d_sum, d_weights.ffn_norm,
           d_weights.ffn_norm_bias);
      ffn(at_.d_sum);
      walk_.visit(Addition{matrix_of(at_.d_sum), matrix_of(at_.d_ffn_input)});
      norm(walk_.attention_norm_of(at_.after_attention), at_.attention_norm, at_.d_ffn_input, {},
           at_.d_after_attention, d_weights.attention_norm, d_weights.attention_norm_bias);
    }
    attention();
    projections();
  }

 private:
  void norm(const NormInputs& from, const Statistics& statistics, const Tensor& dy, const Tensor& d_sum,
            const Tensor& dx, const Tensor& d_weight, const Tensor& d_bias) const {
    walk_.visit(from, walk_.norm_options(),
                NormGradients{.dy = dy,
                              .d_sum = d_sum,
                              .rstd = statistics.rstd,
                              .mean = statistics.mean,
                              .dx = dx,
                              .d_weight = d_weight,
                              .d_bias = d_bias});
  }

  void ffn(const Tensor& d_out) const {
    const LayerWeights& d_weights = to_.weights;
    walk_.visit(walk_.ffn_inputs(at_.ffn_input), walk_.ffn_options(),
                FfnGradients{.d_out = d_out,
                             .dx = at_.d_ffn_input,
                             .d_up = d_weights.up,
                             .d_gate = d_weights.gate,
                             .d_down = d_weights.down,
                             .d_up_bias = d_weights.up_bias,
                             .d_gate_bias = d_weights.gate_bias,
                             .d_down_bias = d_weights.down_bias});
  }

  void product(const Tensor& a, const Tensor& b, const Tensor& out, bool accumulate = false,
               const Tensor& residual = {}) const {
    walk_.visit(GemmInputs{.a = a, .b = b, .residual = residual},
                GemmOptions{.accumulate = accumulate, .precision = walk_.options.precision},
                GemmOutputs{out});
  }

  // The gradients of a weight and its bias, from the gradient of y = x·weightᵀ + bias.
  void weight(const Tensor& x, const Tensor& dy, const Tensor& d_weight, const Tensor& d_bias) const {
    if (d_weight.given()) product(transposed(dy), transposed(x), d_weight);
    if (d_bias.given()) walk_.visit(RowSum{matrix_of(dy), vector_of(d_bias)});
  }

  void attention() const {
    weight(at_.attention_out, at_.d_after_attention, to_.weights.out, to_.weights.out_bias);
    product(at_.d_after_attention, transposed(walk_.weights.out), at_.d_attention_out);
    const Tensor dq = walk_.by_heads(at_.dq), dk = walk_.by_heads(at_.dk);
    walk_.visit(walk_.attention_of(at_), walk_.attention_options(),
                AttentionGradients{.o = walk_.by_heads(at_.attention_out),
                                   .lse = at_.lse,
                                   .d_o = walk_.by_heads(at_.d_attention_out),
                                   .dq = dq,
                                   .dk = dk,
                                   .dv = walk_.by_heads(at_.dv),
                                   .dmask = to_.dmask});
    if (!walk_.config.rotary) return;
    const LayerInputs& inputs = walk_.inputs;
    walk_.visit(
        RopeInputs{.q = dq, .k = dk, .cos = inputs.cos, .sin = inputs.sin, .positions = inputs.positions},
        RopeOptions{.pairs = walk_.config.pairs, .inverse = true}, RopeOutputs{.q = dq, .k = dk});
  }

  void projections() const {
    const LayerWeights& d_weights = to_.weights;
    weight(at_.attention_input, at_.dq, d_weights.q, d_weights.q_bias);
    weight(at_.attention_input, at_.dk, d_weights.k, d_weights.k_bias);
    weight(at_.attention_input, at_.dv, d_weights.v, d_weights.v_bias);
    const bool first = walk_.config.norm_first;
    const Tensor dx = to_.dx.given() ? rows_of(to_.dx) : Tensor();
    const bool of_norm = first && (d_weights.attention_norm.given() || d_weights.attention_norm_bias.given());
    if (!dx.given() && !of_norm) return;
    const Tensor d_attention_input = first ? at_.d_ffn_input : dx;
    product(at_.dq, transposed(walk_.weights.q), d_attention_input, false,
            first ? Tensor() : at_.d_after_attention);
    product(at_.dk, transposed(walk_.weights.k), d_attention_input, true);
    product(at_.dv, transposed(walk_.weights.v), d_attention_input, true);
    if (first) {
      norm(walk_.attention_norm_of(rows_of(walk_.inputs.x)), at_.attention_norm, d_attention_input,
           at_.d_after_attention, dx, d_weights.attention_norm, d_weights.attention_norm_bias);
    }
  }

  const Walk<Visitor>& walk_;
  const LayerGradients& to_;
  const BackwardTensors& at_;
};

auto backward_pass(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerGradients& gradients) {
  return LayerPass{[&](Arena& arena) { return take_tensors(arena, config, inputs); },
                   [&]<typename Visitor>(const BackwardTensors& at, Visitor& visit) {
                     Backward(Walk<Visitor>{config, weights, inputs, options, visit}, gradients, at).run();
                   }};
}

}  // namespace

void layer_backward(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                    const LayerOptions& options, const LayerGradients& gradients, const Context& context) {
  check_layer_backward(config, weights, inputs, gradients, context);
  backward_pass(config, weights, inputs, options, gradients).run(context);
}

std::size_t layer_backward_workspace(const LayerConfig& config, const LayerWeights& weights,
                                     const LayerInputs& inputs, const LayerOptions& options,
                                     const LayerGradients& gradients, const Context& context) {
  check_layer_backward(config, weights, inputs, gradients, context);
  return backward_pass(config, weights, inputs, options, gradients).workspace(context);
}

std::vector<Explanation> explain_layer_backward(const LayerConfig& config, const LayerWeights& weights,
                                                const LayerInputs& inputs, const LayerOptions& options,
                                                const LayerGradients& gradients, const Context& context) {
  check_layer_backward(config, weights, inputs, gradients, context);
  return backward_pass(config, weights, inputs, options, gradients).explain(context);
}

}  // namespace tilewise
