#include "layer/validate.h"
#include "layer/walk.h"

namespace tilewise {
namespace {

// What backward computes anew, and the gradients that stand between the operations.
struct BackwardPlaces : Places {
  Tensor d_sum;     // [M, E]: of `sum`, where norms come after; else d_out itself
  Tensor d_normal;  // [M, E]: of `normal`, later of `attended`
  Tensor d_middle;  // [M, E]
  Tensor d_heads;   // [M, Hq·D]
  Tensor dq, dk, dv;
};

BackwardPlaces take_places(Arena& arena, const LayerConfig& config, const LayerInputs& inputs) {
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
  BackwardPlaces at;
  at.attended = config.norm_first ? take(config.embed_dim) : rows_of(x);
  at.q = take(width_q);
  at.k = take(width_kv);
  at.v = take(width_kv);
  at.heads = take(width_q);
  at.lse = take_one_each(x.extent(0), config.heads_q, x.extent(1));
  at.middle = take(config.embed_dim);
  at.normal = take(config.embed_dim);
  at.attention_norm = take_statistics();
  at.ffn_norm = take_statistics();
  at.d_normal = take(config.embed_dim);
  at.d_middle = take(config.embed_dim);
  if (!config.norm_first) {
    at.sum = take(config.embed_dim);
    at.d_sum = take(config.embed_dim);
  }
  at.d_heads = take(width_q);
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
  Backward(const Walk<Visitor>& walk, const LayerGradients& gradients, const BackwardPlaces& at)
      : walk_(walk), to_(gradients), at_(at) {}

  void run() const {
    walk_.up_to_network(at_);
    const Tensor d_out = rows_of(to_.d_out);
    const LayerWeights& d_weights = to_.weights;
    if (walk_.config.norm_first) {
      network(d_out);
      norm(walk_.ffn_norm_of(at_.middle), at_.ffn_norm, at_.d_normal, d_out, at_.d_middle, d_weights.ffn_norm,
           d_weights.ffn_norm_bias);
    } else {
      walk_.network(at_.normal, at_.normal, at_.sum);
      // For the statistics alone: what it writes is overwritten by the gradient.
      walk_.norm(walk_.ffn_norm_of(at_.sum), at_.d_sum, at_.ffn_norm);
      norm(walk_.ffn_norm_of(at_.sum), at_.ffn_norm, d_out, {}, at_.d_sum, d_weights.ffn_norm,
           d_weights.ffn_norm_bias);
      network(at_.d_sum);
      walk_.visit(Addition{matrix_of(at_.d_sum), matrix_of(at_.d_normal)});
      norm(walk_.attention_norm_of(at_.middle), at_.attention_norm, at_.d_normal, {}, at_.d_middle,
           d_weights.attention_norm, d_weights.attention_norm_bias);
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

  void network(const Tensor& d_out) const {
    const LayerWeights& d_weights = to_.weights;
    walk_.visit(walk_.network_of(at_.normal), walk_.network_options(),
                FfnGradients{.d_out = d_out,
                             .dx = at_.d_normal,
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

  // The gradients of a weight and its bias, from those of the product y = x·weightᵀ + bias.
  void weight(const Tensor& x, const Tensor& dy, const Tensor& d_weight, const Tensor& d_bias) const {
    if (d_weight.given()) product(transposed(dy), transposed(x), d_weight);
    if (d_bias.given()) walk_.visit(RowSum{matrix_of(dy), vector_of(d_bias)});
  }

  void attention() const {
    weight(at_.heads, at_.d_middle, to_.weights.out, to_.weights.out_bias);
    product(at_.d_middle, transposed(walk_.weights.out), at_.d_heads);
    const Tensor dq = walk_.by_heads(at_.dq), dk = walk_.by_heads(at_.dk);
    walk_.visit(walk_.attention_of(at_), walk_.attention_options(),
                AttentionGradients{.o = walk_.by_heads(at_.heads),
                                   .lse = at_.lse,
                                   .d_o = walk_.by_heads(at_.d_heads),
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
    weight(at_.attended, at_.dq, d_weights.q, d_weights.q_bias);
    weight(at_.attended, at_.dk, d_weights.k, d_weights.k_bias);
    weight(at_.attended, at_.dv, d_weights.v, d_weights.v_bias);
    const bool first = walk_.config.norm_first;
    const Tensor dx = to_.dx.given() ? rows_of(to_.dx) : Tensor();
    const bool of_norm = first && (d_weights.attention_norm.given() || d_weights.attention_norm_bias.given());
    if (!dx.given() && !of_norm) return;
    const Tensor d_attended = first ? at_.d_normal : dx;
    product(at_.dq, transposed(walk_.weights.q), d_attended, false, first ? Tensor() : at_.d_middle);
    product(at_.dk, transposed(walk_.weights.k), d_attended, true);
    product(at_.dv, transposed(walk_.weights.v), d_attended, true);
    if (first) {
      norm(walk_.attention_norm_of(rows_of(walk_.inputs.x)), at_.attention_norm, d_attended, at_.d_middle, dx,
           d_weights.attention_norm, d_weights.attention_norm_bias);
    }
  }

  const Walk<Visitor>& walk_;
  const LayerGradients& to_;
  const BackwardPlaces& at_;
};

auto backward_pass(const LayerConfig& config, const LayerWeights& weights, const LayerInputs& inputs,
                   const LayerOptions& options, const LayerGradients& gradients) {
  return LayerPass{[&](Arena& arena) { return take_places(arena, config, inputs); },
                   [&]<typename Visitor>(const BackwardPlaces& at, Visitor& visit) {
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
