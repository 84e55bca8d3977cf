#include "attention/validate.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "attention/views.h"
#include "core/checks.h"

namespace tilewise {
namespace {

// The type of the inputs, or f32 where a piece asks for it.
void check_result_dtype(const Tensor& tensor, std::string_view name, DType inputs, bool piece) {
  if (piece && inputs != DType::f64 && tensor.dtype == DType::f32) return;
  check_dtype(tensor, name, inputs);
}

// A tensor that stands beside q or o: same rows, its own last extent.
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

// f32; f64 where q is, or where a piece asks for it.
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

// Backward of a share of the keys: what it needs, and what it must not be given.
void check_delta(const AttentionInputs& inputs, const AttentionOptions& options,
                 const AttentionGradients& gradients, const Context& context) {
  check(options.piece.has_value(), "delta", "none but of a piece", gradients.delta);
  check(!inputs.sinks.given(), "sinks", "none beside delta, as lse has them", inputs.sinks);
  check(!gradients.o.given(), "o", "none beside delta", gradients.o);
  check_lse(gradients.delta, "delta", inputs.q, context, true);
  check_dtype(gradients.delta, "delta", gradients.lse.dtype);
}

bool wide_results(const AttentionCall& call) {
  const DType dtype = call.problem.dtype;
  for (const Rows* rows : {&call.o, &call.dq, &call.dk, &call.dv}) {
    if (rows->wanted && rows->dtype != dtype) return true;
  }
  return dtype != DType::f64 && call.lse.wanted && call.lse.dtype == DType::f64;
}

void check_written(std::initializer_list<Named> written, const AttentionInputs& inputs) {
  check_written(written, {{"q", &inputs.q},
                          {"k", &inputs.k},
                          {"v", &inputs.v},
                          {"mask", &inputs.mask},
                          {"alibi_slopes", &inputs.alibi_slopes},
                          {"sinks", &inputs.sinks},
                          {"key_lengths", &inputs.key_lengths},
                          {"page_table", &inputs.page_table},
                          {"dropout_seed", &inputs.dropout_seed},
                          {"packed.cumulative_q", &inputs.packed.cumulative_q},
                          {"packed.cumulative_k", &inputs.packed.cumulative_k},
                          {"blocks.counts", &inputs.blocks.counts},
                          {"blocks.indices", &inputs.blocks.indices},
                          {"blocks.full_counts", &inputs.blocks.full_counts},
                          {"blocks.full_indices", &inputs.blocks.full_indices},
                          {"blocks.tile_ids", &inputs.blocks.tile_ids},
                          {"blocks.tiles", &inputs.blocks.tiles}});
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

BackwardDetails backward_details(const AttentionCall& call) {
  const auto tensors = {&call.q, &call.k, &call.v, &call.o, &call.d_o, &call.dq, &call.dk, &call.dv};
  return {
      .deterministic = call.deterministic,
      .aligned_rows =
          std::all_of(tensors.begin(), tensors.end(), [](const Rows* rows) { return aligned_rows(*rows); }),
      .repeated_keys = call.problem.repeated_values || (call.problem.length_k > 1 && call.k.stride_s == 0),
      .alike_queries = call.problem.length_q > 1 && (call.q.stride_s == 0 || call.scale == 0),
      .thinned_queries =
          call.problem.features.block_mask || (call.mask.data != nullptr && call.mask.stride[2] != 0),
      .elements = smallest_gradient(call)};
}

}  // namespace

AttentionCall checked_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                              const AttentionOutputs& outputs, const Context& context, ResultMemory memory) {
  AttentionCall call = checked_inputs(Pass::forward, inputs, options, context);
  AttentionProblem& problem = call.problem;
  check_beside_q(outputs.o, "o", problem.dim_v, inputs.q.rank == 3 ? "[total_q, Hq, Dv]" : "[B, Hq, Sq, Dv]",
                 inputs.q, context, options.piece.has_value());
  if (outputs.lse.given()) check_lse(outputs.lse, "lse", inputs.q, context, options.piece.has_value());
  if (memory == ResultMemory::callers) check_written({{"o", &outputs.o}, {"lse", &outputs.lse}}, inputs);
  call.o = rows_of(outputs.o, problem.layout);
  call.lse = statistics_of(outputs.lse, problem.layout);
  problem.piece.wide_results = wide_results(call);
  return call;
}

AttentionCall checked_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                               const AttentionGradients& gradients, const Context& context,
                               ResultMemory memory) {
  AttentionCall call = checked_inputs(Pass::backward, inputs, options, context);
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

  const std::initializer_list<Named> written = {{"dq", &gradients.dq},
                                                {"dk", &gradients.dk},
                                                {"dv", &gradients.dv},
                                                {"dmask", &gradients.dmask},
                                                {"dsinks", &gradients.dsinks}};
  if (memory == ResultMemory::callers) {
    check_written(written, inputs);
    check_written(written, {{"o", &gradients.o},
                            {"lse", &gradients.lse},
                            {"d_o", &gradients.d_o},
                            {"d_lse", &gradients.d_lse},
                            {"delta", &gradients.delta}});
  }

  problem.features.mask_gradient = gradients.dmask.given();
  call.o = rows_of(gradients.o, problem.layout);
  call.lse = statistics_of(gradients.lse, problem.layout);
  call.d_o = rows_of(gradients.d_o, problem.layout);
  call.d_lse = statistics_of(gradients.d_lse, problem.layout);
  call.dq = rows_of(gradients.dq, problem.layout);
  call.dk = rows_of(gradients.dk, problem.layout);
  call.dv = rows_of(gradients.dv, problem.layout);
  call.delta = statistics_of(gradients.delta, problem.layout);
  problem.piece.wide_results = wide_results(call);
  problem.piece.share_of_keys = share;
  problem.backward = backward_details(call);
  call.dmask = mask_view(gradients.dmask);
  call.dsinks = static_cast<std::byte*>(gradients.dsinks.data);
  call.dsinks_stride = gradients.dsinks.stride(0);
  return call;
}

}  // namespace tilewise
