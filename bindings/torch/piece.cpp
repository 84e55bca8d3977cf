#include <vector>

#include "arguments.h"
#include "attention.h"
#include "check.h"
#include "kinds.h"

// Attention of a piece of a whole, for tilewise.distributed. Tensors are dense. These operators have no
// autograd formula of their own; tilewise.distributed computes gradients with them.

namespace tilewise::torch_binding {
namespace {

using OptionalTensor = AttentionArguments::OptionalTensor;
using torch::stable::detail::from;

constexpr std::string_view statistics = "f32 or f64";

Piece piece_of(const std::vector<std::int64_t>& place) {
  check(place.size() == 8, "place", "8 numbers", place.size());
  return {.q_offset = place[0],
          .k_offset = place[1],
          .step = place[2],
          .length_q = place[3],
          .length_k = place[4],
          .batch_offset = place[5],
          .head_offset = place[6],
          .heads_q = place[7]};
}

/// Allocates results in the type of the inputs or, if `wide`, in f32, so that sums over many pieces are exact
/// enough.
class Results {
 public:
  Results(const AttentionInputs& inputs, bool wide, bool wide_lse)
      : inputs_(inputs), wide_(wide), wide_lse_(wide_lse) {}

  TorchTensor rows(const Tensor& like, std::int64_t last) const {
    if (!wide_) return empty_beside(like, last);
    std::vector<std::int64_t> shape(like.shape.begin(), like.shape.begin() + like.rank);
    shape.back() = last;
    return empty(shape, wide_type(like.dtype), like.device);
  }
  TorchTensor like(const Tensor& tensor) const {
    return empty(std::span(tensor.shape).first(static_cast<std::size_t>(tensor.rank)),
                 wide_ ? wide_type(tensor.dtype) : tensor.dtype, tensor.device);
  }
  TorchTensor lse() const {
    const Tensor& q = inputs_.q;
    return empty(std::span(q.shape).first(3), wide_lse_ ? DType::f64 : wide_type(q.dtype), q.device);
  }

 private:
  static DType wide_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  const AttentionInputs& inputs_;
  bool wide_, wide_lse_;
};

/// The arguments that both passes share.
struct PieceCall {
  explicit PieceCall(ArgumentStack& stack)
      : place(stack.take<std::vector<std::int64_t>>()),
        wide(stack.take<bool>()),
        wide_lse(stack.take<bool>()),
        arguments(stack) {}

  void prepare() {
    inputs = arguments.inputs();
    options = arguments.options();
    options.piece = piece_of(place);
    check(inputs.q.rank == 4, "q", "rank 4 [B, Hq, Sq, D]", inputs.q);
  }

  std::vector<std::int64_t> place;
  bool wide, wide_lse;
  AttentionArguments arguments;
  AttentionInputs inputs;
  AttentionOptions options;
};

std::pair<TorchTensor, TorchTensor> forward(PieceCall& call) {
  call.prepare();
  const AttentionInputs& inputs = call.inputs;
  Runtime runtime(inputs.q.device, work_of(inputs));
  const Results results(inputs, call.wide, call.wide_lse);
  TorchTensor o = results.rows(inputs.q, inputs.v.extent(inputs.v.rank - 1));
  TorchTensor lse = results.lse();
  const AttentionOutputs outputs{.o = view(o, "o", floating), .lse = view(lse, "lse", statistics)};
  runtime.run(plan_attention_forward(inputs, call.options, outputs, runtime.context(), ResultMemory::fresh));
  return {std::move(o), std::move(lse)};
}

/// The arguments that only attention_piece_backward has.
struct PieceBackwardArguments {
  explicit PieceBackwardArguments(ArgumentStack& stack)
      : grad_out(stack.take<TorchTensor>()),
        grad_lse(stack.take<OptionalTensor>()),
        out(stack.take<OptionalTensor>()),
        lse(stack.take<TorchTensor>()),
        delta(stack.take<OptionalTensor>()),
        needed(stack.take<std::vector<bool>>()) {}

  TorchTensor grad_out;
  OptionalTensor grad_lse, out;
  TorchTensor lse;
  OptionalTensor delta;
  std::vector<bool> needed;  // of query, key, value, mask, sinks and logit_scale
};

std::vector<TorchTensor> backward(const PieceBackwardArguments& given, PieceCall& call) {
  call.prepare();
  const AttentionInputs& inputs = call.inputs;
  check(given.needed.size() == 6, "needed", "6 values", given.needed.size());
  Runtime runtime(inputs.q.device, work_of(inputs));
  const Results results(inputs, call.wide, call.wide_lse);
  const TorchTensor grad_out = with_contiguous_last(given.grad_out);
  std::vector<TorchTensor> memory;
  AttentionGradients gradients{.lse = view(given.lse, "lse", statistics),
                               .d_o = view(grad_out, "d_o", floating)};
  if (given.out) gradients.o = view(*given.out, "o", floating);
  if (given.delta) gradients.delta = view(*given.delta, "delta", statistics);
  if (given.grad_lse) gradients.d_lse = view(*given.grad_lse, "d_lse", statistics);
  const auto rows = [&](std::size_t which, const Tensor& like, Tensor& gradient, std::string_view name) {
    if (!given.needed[which]) return;
    memory.push_back(results.rows(like, like.extent(like.rank - 1)));
    gradient = view(memory.back(), name, floating);
  };
  rows(0, inputs.q, gradients.dq, "dq");
  rows(1, inputs.k, gradients.dk, "dk");
  rows(2, inputs.v, gradients.dv, "dv");
  if (given.needed[3] && inputs.mask.given()) {
    memory.push_back(results.like(inputs.mask));
    gradients.dmask = view(memory.back(), "dmask", floating);
  }
  if (given.needed[4] && inputs.sinks.given()) {
    memory.push_back(empty_like(inputs.sinks));
    gradients.dsinks = view(memory.back(), "dsinks", floating);
  }
  if (given.needed[5] && inputs.logit_scale.given()) {
    memory.push_back(empty_like(inputs.logit_scale));
    gradients.dlogit_scale = view(memory.back(), "dlogit_scale", floating);
  }
  runtime.run(
      plan_attention_backward(inputs, call.options, gradients, runtime.context(), ResultMemory::fresh));
  return memory;
}

}  // namespace

void attention_piece_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    PieceCall call(taken);
    const auto [o, lse] = forward(call);
    stack[0] = from(o);
    stack[1] = from(lse);
  });
}

void attention_piece_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const PieceBackwardArguments given(taken);
    PieceCall call(taken);
    stack[0] = from(backward(given, call));
  });
}

}  // namespace tilewise::torch_binding
