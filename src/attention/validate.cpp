#include "attention/validate.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <tuple>

#include "attention/views.h"
#include "core/checks.h"

namespace tilewise {
namespace {

// Results have the type of the inputs; those of a piece may also be f32.
void check_result_dtype(const Tensor& tensor, std::string_view name, DType inputs, bool piece) {
  if (piece && inputs != DType::f64 && tensor.dtype == DType::f32) return;
  check_dtype(tensor, name, inputs);
}

// Checks a tensor with the rows of q and `dim` as its last extent.
void check_beside_q(const Tensor& tensor, std::string_view name, std::int64_t dim, std::string_view meaning,
                    const Tensor& q, const Context& context, bool piece = false) {
  if (q.rank == 3) {
    check_shape(tensor, name, {q.extent(0), q.extent(1), dim}, meaning, context);
  } else {
    check_shape(tensor, name, {q.extent(0), q.extent(1), q.extent(2), dim}, meaning, context);
  }
  check_result_dtype(tensor, name, q.dtype, piece);
  check_contiguous_last(tensor, name);
}

// LSE, dLSE and delta are f32. They are f64 if q is, and those of a piece may be f64.
void check_lse(const Tensor& tensor, std::string_view name, const Tensor& q, const Context& context,
               bool piece) {
  if (q.rank == 3) {
    check_shape(tensor, name, {q.extent(1), q.extent(0)}, "[Hq, total_q]", context);
  } else {
    check_shape(tensor, name, {q.extent(0), q.extent(1), q.extent(2)}, "[B, Hq, Sq]", context);
  }
  const bool wide = q.dtype == DType::f64 || (piece && tensor.dtype == DType::f64);
  check_dtype(tensor, name, wide ? DType::f64 : DType::f32);
}

// Checks what backward of a piece with some of the keys needs, and what it must not be given.
void check_delta(const AttentionInputs& inputs, const AttentionOptions& options,
                 const AttentionGradients& gradients, const Context& context) {
  check(options.piece.has_value(), "delta", "none without a piece", gradients.delta);
  check(!inputs.sinks.given(), "sinks", "none with delta, since lse includes them", inputs.sinks);
  check(!gradients.o.given(), "o", "none with delta", gradients.o);
  check_lse(gradients.delta, "delta", inputs.q, context, true);
  check_dtype(gradients.delta, "delta", gradients.lse.dtype);
}

// Notes in the problem which results are wider than the inputs.
void set_wide_results(AttentionCall& call) {
  const DType dtype = call.problem.dtype;
  PieceDetails& piece = call.problem.piece;
  for (const Rows* rows : {&call.o, &call.dq, &call.dk, &call.dv}) {
    piece.wide_rows = piece.wide_rows || (rows->wanted && rows->dtype != dtype);
  }
  piece.wide_statistics = dtype != DType::f64 && call.lse.wanted && call.lse.dtype == DType::f64;
}

// The tensors with their names, in the order of the structs.
auto named(const AttentionInputs& inputs) {
  return std::array{Named{"q", &inputs.q},
                    Named{"k", &inputs.k},
                    Named{"v", &inputs.v},
                    Named{"mask", &inputs.mask},
                    Named{"alibi_slopes", &inputs.alibi_slopes},
                    Named{"sinks", &inputs.sinks},
                    Named{"logit_scale", &inputs.logit_scale},
                    Named{"key_lengths", &inputs.key_lengths},
                    Named{"page_table", &inputs.page_table},
                    Named{"dropout_seed", &inputs.dropout_seed},
                    Named{"packed.cumulative_q", &inputs.packed.cumulative_q},
                    Named{"packed.cumulative_k", &inputs.packed.cumulative_k},
                    Named{"blocks.counts", &inputs.blocks.counts},
                    Named{"blocks.indices", &inputs.blocks.indices},
                    Named{"blocks.full_counts", &inputs.blocks.full_counts},
                    Named{"blocks.full_indices", &inputs.blocks.full_indices},
                    Named{"blocks.tile_ids", &inputs.blocks.tile_ids},
                    Named{"blocks.tiles", &inputs.blocks.tiles}};
}
auto named(const AttentionOutputs& outputs) {
  return std::array{Named{"o", &outputs.o}, Named{"lse", &outputs.lse}};
}
auto named_read(const AttentionGradients& gradients) {
  return std::array{Named{"o", &gradients.o}, Named{"lse", &gradients.lse}, Named{"d_o", &gradients.d_o},
                    Named{"d_lse", &gradients.d_lse}, Named{"delta", &gradients.delta}};
}
auto named_written(const AttentionGradients& gradients) {
  return std::array{Named{"dq", &gradients.dq},         Named{"dk", &gradients.dk},
                    Named{"dv", &gradients.dv},         Named{"dmask", &gradients.dmask},
                    Named{"dsinks", &gradients.dsinks}, Named{"dlogit_scale", &gradients.dlogit_scale}};
}

bool aligned_rows(const Rows& rows) {
  const std::int64_t strides =
      (rows.stride_b | rows.stride_h | rows.stride_s) * static_cast<std::int64_t>(size_of(rows.dtype));
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return !rows.wanted || ((address | strides) & 15) == 0;
}

std::int64_t smallest_gradient(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  return std::min({problem.heads_q * call.rows_q() * problem.dim_qk,
                   problem.heads_kv * call.rows_k() * problem.dim_qk,
                   problem.heads_kv * call.rows_k() * problem.dim_v});
}

bool sums_dmask(const AttentionCall& call) {
  const std::int64_t whole[] = {call.problem.batch, call.problem.heads_q, call.problem.length_q,
                                call.problem.length_k};
  return call.problem.features.mask_gradient &&
         !std::equal(std::begin(whole), std::end(whole), std::begin(call.dmask.extent));
}

BackwardDetails backward_details(const AttentionCall& call) {
  const auto tensors = {&call.q, &call.k, &call.v, &call.o, &call.d_o, &call.dq, &call.dk, &call.dv};
  return {
      .deterministic = call.deterministic,
      .aligned_rows =
          std::all_of(tensors.begin(), tensors.end(), [](const Rows* rows) { return aligned_rows(*rows); }),
      .ordered_rows = std::min({call.d_o.stride_b, call.d_o.stride_h, call.d_o.stride_s}) >= 0,
      .repeated_keys = call.problem.repeated_values || (call.problem.length_k > 1 && call.k.stride_s == 0),
      .summed_dmask = sums_dmask(call),
      .elements = smallest_gradient(call)};
}

}  // namespace

void check_same_form(const AttentionInputs& planned, const AttentionInputs& inputs) {
  check_same_forms(named(planned), named(inputs));
  const auto check_same = [](std::int64_t planned_value, std::int64_t value, std::string_view name) {
    check(
        value == planned_value, name, [&] { return std::to_string(planned_value) + ", as planned"; }, value);
  };
  check_same(planned.packed.max_length_q, inputs.packed.max_length_q, "packed.max_length_q");
  check_same(planned.packed.max_length_k, inputs.packed.max_length_k, "packed.max_length_k");
  check_same(planned.blocks.block_q, inputs.blocks.block_q, "blocks.block_q");
  check_same(planned.blocks.block_k, inputs.blocks.block_k, "blocks.block_k");
}
void check_same_form(const AttentionOutputs& planned, const AttentionOutputs& outputs) {
  check_same_forms(named(planned), named(outputs));
}
void check_same_form(const AttentionGradients& planned, const AttentionGradients& gradients) {
  check_same_forms(named_read(planned), named_read(gradients));
  check_same_forms(named_written(planned), named_written(gradients));
}

void check_apart(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  check_written(named(outputs), named(inputs));
}
void check_apart(const AttentionInputs& inputs, const AttentionGradients& gradients) {
  check_written(named_written(gradients), named(inputs));
  check_written(named_written(gradients), named_read(gradients));
}

void set_views(const AttentionOutputs& outputs, AttentionCall& call) {
  const Layout layout = call.problem.layout;
  call.o = rows_of(outputs.o, layout);
  call.lse = statistics_of(outputs.lse, layout);
}
void set_views(const AttentionGradients& gradients, AttentionCall& call) {
  const Layout layout = call.problem.layout;
  call.o = rows_of(gradients.o, layout);
  call.lse = statistics_of(gradients.lse, layout);
  call.d_o = rows_of(gradients.d_o, layout);
  call.d_lse = statistics_of(gradients.d_lse, layout);
  call.dq = rows_of(gradients.dq, layout);
  call.dk = rows_of(gradients.dk, layout);
  call.dv = rows_of(gradients.dv, layout);
  call.delta = statistics_of(gradients.delta, layout);
  call.dmask = mask_view(gradients.dmask);
  call.dsinks = static_cast<std::byte*>(gradients.dsinks.data);
  call.dsinks_stride = gradients.dsinks.stride(0);
  call.dlogit_scale = static_cast<std::byte*>(gradients.dlogit_scale.data);
  call.dlogit_scale_stride = gradients.dlogit_scale.stride(0);
}

AttentionCall checked_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                              const AttentionOutputs& outputs, const Context& context, ResultMemory memory,
                              Contents contents) {
  AttentionCall call = checked_inputs(Pass::forward, inputs, options, context, contents);
  AttentionProblem& problem = call.problem;
  check_beside_q(outputs.o, "o", problem.dim_v, inputs.q.rank == 3 ? "[total_q, Hq, Dv]" : "[B, Hq, Sq, Dv]",
                 inputs.q, context, options.piece.has_value());
  if (outputs.lse.given()) check_lse(outputs.lse, "lse", inputs.q, context, options.piece.has_value());
  if (memory == ResultMemory::callers) check_apart(inputs, outputs);
  set_views(outputs, call);
  set_wide_results(call);
  return call;
}

AttentionCall checked_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                               const AttentionGradients& gradients, const Context& context,
                               ResultMemory memory, Contents contents) {
  AttentionCall call = checked_inputs(Pass::backward, inputs, options, context, contents);
  AttentionProblem& problem = call.problem;
  const Tensor& q = inputs.q;
  const std::string_view o_meaning = q.rank == 3 ? "[total_q, Hq, Dv]" : "[B, Hq, Sq, Dv]";
  const bool piece = options.piece.has_value();
  const bool share = gradients.delta.given();
  if (!share) check_beside_q(gradients.o, "o", problem.dim_v, o_meaning, q, context);
  check_beside_q(gradients.d_o, "d_o", problem.dim_v, o_meaning, q, context);
  check_lse(gradients.lse, "lse", q, context, piece);
  if (share) check_delta(inputs, options, gradients, context);
  if (gradients.d_lse.given()) {
    check_lse(gradients.d_lse, "d_lse", q, context, piece);
    check_dtype(gradients.d_lse, "d_lse", gradients.lse.dtype);
  }
  if (gradients.dq.given()) {
    check_beside_q(gradients.dq, "dq", problem.dim_qk, "the shape of q", q, context, piece);
  }
  const auto check_like = [&](const Tensor& tensor, std::string_view name, const Tensor& like,
                              std::string_view like_name) {
    if (!tensor.given()) return;
    check(
        same_shape(tensor, like), name,
        [&] { return "the shape of " + std::string(like_name) + ", " + shape_string(like); }, tensor);
    check_memory(tensor, name, context);
  };
  for (const auto& [tensor, name, like, like_name] :
       {std::tuple(&gradients.dk, "dk", &inputs.k, "k"), std::tuple(&gradients.dv, "dv", &inputs.v, "v")}) {
    check_like(*tensor, name, *like, like_name);
    if (!tensor->given()) continue;
    check_result_dtype(*tensor, name, problem.dtype, piece);
    check_contiguous_last(*tensor, name);
  }
  if (gradients.dmask.given()) {
    check(problem.features.mask == MaskKind::additive, "dmask", "an additive mask to differentiate",
          inputs.mask.given() ? "a boolean mask" : "no mask");
    check_like(gradients.dmask, "dmask", inputs.mask, "mask");
    const DType dtype = gradients.dmask.dtype;
    check(
        dtype == inputs.mask.dtype || dtype == DType::f32, "dmask",
        [&] { return "f32 or the type of mask, " + std::string(to_string(inputs.mask.dtype)); },
        to_string(dtype));
  }
  if (gradients.dsinks.given()) {
    check(problem.features.sinks, "dsinks", "sinks to differentiate", "no sinks");
    check_like(gradients.dsinks, "dsinks", inputs.sinks, "sinks");
    check_dtype(gradients.dsinks, "dsinks", inputs.sinks.dtype);
  }
  if (gradients.dlogit_scale.given()) {
    check(problem.features.logit_scale, "dlogit_scale", "logit_scale to differentiate", "no logit_scale");
    check_like(gradients.dlogit_scale, "dlogit_scale", inputs.logit_scale, "logit_scale");
    check_dtype(gradients.dlogit_scale, "dlogit_scale", inputs.logit_scale.dtype);
    check(gradients.dq.given(), "dq", "a tensor, since dlogit_scale is computed from it", "none");
  }

  if (memory == ResultMemory::callers) check_apart(inputs, gradients);

  problem.features.mask_gradient = gradients.dmask.given();
  set_views(gradients, call);
  set_wide_results(call);
  problem.piece.share_of_keys = share;
  problem.backward = backward_details(call);
  return call;
}

}  // namespace tilewise
