#include "attention.h"

#include <array>
#include <sstream>
#include <string>
#include <vector>

#include "arguments.h"
#include "kinds.h"

namespace tilewise::torch_binding {
namespace {

using OptionalTensor = AttentionArguments::OptionalTensor;
using PlainMask = AttentionArguments::PlainMask;
using torch::stable::detail::from;

Tensor statistics_view(const TorchTensor& tensor, std::string_view name) {
  return view(tensor, name, "f32, or f64 where q is");
}

/// Allocates the outputs of forward, unless the shapes are malformed: then the library throws before it looks
/// at outputs.
struct Outputs {
  Outputs(const AttentionInputs& inputs, bool with_lse) {
    const Tensor& q = inputs.q;
    const Tensor& v = inputs.v;
    if (q.rank < 3 || v.rank != q.rank) return;
    o = empty_beside(q, v.extent(v.rank - 1));
    views.o = view(*o, "o", floating);
    if (!with_lse) return;
    const DType dtype = q.dtype == DType::f64 ? DType::f64 : DType::f32;
    const std::array packed_rows = {q.extent(1), q.extent(0)};
    const auto rows = std::span(q.shape).first(static_cast<std::size_t>(q.rank - 1));
    lse = empty(inputs.packed.given() ? std::span<const std::int64_t>(packed_rows) : rows, dtype, q.device);
    views.lse = statistics_view(*lse, "lse");
  }

  OptionalTensor o, lse;
  AttentionOutputs views;
};

Outputs run_forward(AttentionArguments& arguments, bool with_lse) {
  const AttentionInputs inputs = arguments.inputs();
  const AttentionOptions options = arguments.options();
  Runtime runtime(inputs.q.device, work_of(inputs));
  Outputs outputs(inputs, with_lse);
  runtime.run(plan_attention_forward(inputs, options, outputs.views, runtime.context(), ResultMemory::fresh));
  return outputs;
}

/// The gradients of backward, in the order of its argument `needed`.
enum Gradient : std::size_t {
  gradient_q,
  gradient_k,
  gradient_v,
  gradient_mask,
  gradient_sinks,
  gradient_logit_scale
};

/// Allocates the gradients that are needed.
struct Gradients {
  Gradients(const std::vector<bool>& needed, const AttentionInputs& inputs) {
    const auto add = [&](Gradient which, const Tensor& like, Tensor& gradient, std::string_view name) {
      if (which >= needed.size() || !needed[which] || !like.given()) return;
      memory.push_back(which <= gradient_v ? empty_beside(like, like.extent(like.rank - 1))
                                           : empty_like(like));
      gradient = view(memory.back(), name, floating);
    };
    add(gradient_q, inputs.q, views.dq, "dq");
    add(gradient_k, inputs.k, views.dk, "dk");
    add(gradient_v, inputs.v, views.dv, "dv");
    add(gradient_mask, inputs.mask, views.dmask, "dmask");
    add(gradient_sinks, inputs.sinks, views.dsinks, "dsinks");
    add(gradient_logit_scale, inputs.logit_scale, views.dlogit_scale, "dlogit_scale");
    if (views.dlogit_scale.given() && !views.dq.given()) {
      unasked_dq = empty_beside(inputs.q, inputs.q.extent(inputs.q.rank - 1));
      views.dq = view(*unasked_dq, "dq", floating);
    }
  }

  std::vector<TorchTensor> memory;
  OptionalTensor unasked_dq;  // dlogit_scale is computed from dq
  AttentionGradients views;
};

/// The arguments of attention_backward that precede those of attention.
struct BackwardArguments {
  explicit BackwardArguments(ArgumentStack& stack)
      : grad_out(stack.take<TorchTensor>()),
        grad_lse(stack.take<OptionalTensor>()),
        out(stack.take<TorchTensor>()),
        lse(stack.take<TorchTensor>()),
        needed(stack.take<std::vector<bool>>()) {}

  TorchTensor grad_out;
  OptionalTensor grad_lse;
  TorchTensor out, lse;
  std::vector<bool> needed;
};

std::vector<TorchTensor> run_backward(const BackwardArguments& backward, AttentionArguments& arguments) {
  const AttentionInputs inputs = arguments.inputs();
  const AttentionOptions options = arguments.options();
  Runtime runtime(inputs.q.device, work_of(inputs));
  const TorchTensor out = with_contiguous_last(backward.out);
  const TorchTensor grad_out = with_contiguous_last(backward.grad_out);
  Gradients gradients(backward.needed, inputs);
  gradients.views.o = view(out, "o", floating);
  gradients.views.lse = statistics_view(backward.lse, "lse");
  gradients.views.d_o = view(grad_out, "d_o", floating);
  if (backward.grad_lse) gradients.views.d_lse = statistics_view(*backward.grad_lse, "d_lse");
  runtime.run(
      plan_attention_backward(inputs, options, gradients.views, runtime.context(), ResultMemory::fresh));
  return std::move(gradients.memory);
}

std::string explain_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                            const Context& context) {
  const Outputs outputs(inputs, true);
  return to_string(explain_attention_forward(inputs, options, outputs.views, context));
}

std::string explain_backward(const std::vector<bool>& needed, const AttentionInputs& inputs,
                             const AttentionOptions& options, const Context& context) {
  const Outputs outputs(inputs, true);
  const Outputs output_gradients(inputs, false);
  Gradients gradients(needed, inputs);
  gradients.views.o = outputs.views.o;
  gradients.views.lse = outputs.views.lse;
  gradients.views.d_o = output_gradients.views.o;
  return to_string(explain_attention_backward(inputs, options, gradients.views, context));
}

// The overload with a mask has five arguments, the one without has four.
PlainMask mask_of(std::uint64_t plain_arguments) {
  return plain_arguments == 5 ? PlainMask::given : PlainMask::none;
}

}  // namespace

void attention_forward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    AttentionArguments arguments(taken);
    const Outputs outputs = run_forward(arguments, true);
    stack[0] = from(*outputs.o);
    stack[1] = from(*outputs.lse);
  });
}

void attention_inference_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    AttentionArguments plain = AttentionArguments::plain(taken, mask_of(arguments));
    stack[0] = from(*run_forward(plain, false).o);
  });
}

void attention_training_op(StableIValue* stack, std::uint64_t arguments, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    AttentionArguments plain = AttentionArguments::plain(taken, mask_of(arguments));
    const Outputs outputs = run_forward(plain, true);
    stack[0] = from(*outputs.o);
    stack[1] = from(*outputs.lse);
  });
}

void attention_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const BackwardArguments backward(taken);
    AttentionArguments arguments(taken);
    stack[0] = from(run_backward(backward, arguments));
  });
}

void attention_training_backward_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const BackwardArguments backward(taken);
    AttentionArguments arguments = AttentionArguments::plain(taken, PlainMask::optional);
    arguments.deterministic = taken.take<bool>();
    stack[0] = from(run_backward(backward, arguments));
  });
}

void explain_attention_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    const auto needed = taken.take<std::vector<bool>>();
    AttentionArguments arguments(taken);
    const AttentionInputs inputs = arguments.inputs();
    const AttentionOptions options = arguments.options();
    const Runtime runtime(inputs.q.device, work_of(inputs));
    const Context& context = runtime.context();
    stack[0] = from(needed.empty() ? explain_forward(inputs, options, context)
                                   : explain_backward(needed, inputs, options, context));
  });
}

void check_attention_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_error_kinds([&] {
    ArgumentStack taken(stack);
    AttentionArguments arguments(taken);
    const AttentionInputs inputs = arguments.inputs();
    check_attention_inputs(inputs, arguments.options(), {.device = inputs.q.device, .parallel_for = {}});
  });
}

void attention_kernels_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  std::vector<std::string> names;
  for (std::string_view name : attention_kernels()) names.emplace_back(name);
  stack[0] = from(names);
}

void cuda_code_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  std::vector<std::string> names;
#ifdef TILEWISE_CUDA_CODE
  std::istringstream listed(TILEWISE_CUDA_CODE);
  for (std::string name; std::getline(listed, name, ',');) names.push_back(name);
#endif
  stack[0] = from(names);
}

void simd_levels_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  std::vector<std::string> names;
  for (std::string_view name : simd_levels()) names.emplace_back(name);
  stack[0] = from(names);
}

void version_op(StableIValue* stack, std::uint64_t, std::uint64_t) { stack[0] = from(std::string(version)); }

}  // namespace tilewise::torch_binding
