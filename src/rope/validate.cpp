#include "rope/validate.h"

#include "core/checks.h"
#include "core/debug.h"
#include "core/sizes.h"
#include "rope/index_rules.h"
#include "rope/kernel.h"
#ifdef TILEWISE_HAS_CUDA
#include "cuda/runtime/check_indices.h"
#endif

namespace tilewise {
namespace {

Rows rows_of(const Tensor& tensor) {
  if (!tensor.given()) return {};
  return {.data = static_cast<std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .stride_b = tensor.stride(0),
          .stride_h = tensor.stride(1),
          .stride_s = tensor.stride(2),
          .wanted = true};
}

Angles angles_of(const Tensor& tensor) {
  const bool table = tensor.rank == 2;
  // Tables without angles may have null data; no offset may be added to a null pointer.
  if (tensor.data == nullptr) return {.dtype = tensor.dtype};
  return {.data = static_cast<std::byte*>(tensor.data),
          .dtype = tensor.dtype,
          .stride_b = table || tensor.extent(0) == 1 ? 0 : tensor.stride(0),
          .stride_row = tensor.stride(table ? 0 : 1)};
}

// q, k, v: rank, type and agreement; fills the problem's shape.
void check_heads(const RopeInputs& inputs, const Context& context, RopeProblem& problem) {
  check(inputs.q.given() || inputs.k.given(), "q", "q or k to rotate", "neither");
  const Tensor& first = inputs.q.given() ? inputs.q : inputs.k;
  for (const auto& [tensor, name] :
       {std::pair(&inputs.q, "q"), std::pair(&inputs.k, "k"), std::pair(&inputs.v, "v")}) {
    if (!tensor->given()) continue;
    check(tensor->rank == 4, name, "rank 4 [B, H, S, D]", *tensor);
    check(is_floating(tensor->dtype), name, "f32, f16, bf16 or f64", to_string(tensor->dtype));
    check_dtype(*tensor, name, first.dtype);
    check_memory(*tensor, name, context);
    check_contiguous_last(*tensor, name);
    check(
        tensor->extent(0) == first.extent(0) && tensor->extent(2) == first.extent(2), name,
        [&] {
          return "batch " + std::to_string(first.extent(0)) + " and length " +
                 std::to_string(first.extent(2));
        },
        *tensor);
  }
  problem.device = context.device;
  problem.dtype = first.dtype;
  problem.batch = first.extent(0);
  problem.length = first.extent(2);
  problem.dim = first.extent(3);
  if (inputs.q.given()) problem.heads_q = inputs.q.extent(1);
  if (inputs.k.given()) {
    problem.heads_kv = inputs.k.extent(1);
    check(
        inputs.k.extent(3) == problem.dim, "k",
        [&] { return "the head dim of q, " + std::to_string(problem.dim); }, inputs.k);
  }
  if (inputs.v.given()) {
    check(inputs.k.given(), "v", "k as well", "no k");
    problem.dim_v = inputs.v.extent(3);
    check(
        inputs.v.extent(1) == problem.heads_kv, "v",
        [&] { return "as many heads as k, " + std::to_string(problem.heads_kv); }, inputs.v);
  }
}

void check_angles(const RopeInputs& inputs, const Context& context, RopeProblem& problem) {
  const Tensor& cos = inputs.cos;
  check(cos.rank == 2 || cos.rank == 3, "cos", "a table [positions, R/2] or [B|1, S, R/2]", cos);
  const bool exact = problem.dtype == DType::f64 && cos.dtype == DType::f64;
  check(
      cos.dtype == DType::f32 || cos.dtype == problem.dtype || exact, "cos",
      [&] { return "f32 or the type of q, " + std::string(to_string(problem.dtype)); }, to_string(cos.dtype));
  check_memory(cos, "cos", context);
  check_contiguous_last(cos, "cos");
  const Tensor& sin = inputs.sin;
  check(same_shape(sin, cos), "sin", [&] { return "the shape of cos, " + shape_string(cos); }, sin);
  check_dtype(sin, "sin", cos.dtype);
  check_memory(sin, "sin", context);
  check_contiguous_last(sin, "sin");
  problem.angle_dtype = cos.dtype;
  problem.rotary_dim = 2 * cos.extent(cos.rank - 1);
  check(
      problem.rotary_dim <= problem.dim, "cos",
      [&] { return "at most half the head dim " + std::to_string(problem.dim); }, cos);
  if (cos.rank == 3) {
    check((cos.extent(0) == 1 || cos.extent(0) == problem.batch) && cos.extent(1) == problem.length, "cos",
          [&] {
            return "[B|1, S, R/2] with B " + std::to_string(problem.batch) + " and S " +
                   std::to_string(problem.length);
          },
          cos);
    check(!inputs.positions.given(), "positions", "none if cos has the angles of each token",
          inputs.positions);
  } else if (!inputs.positions.given()) {
    check(
        cos.extent(0) >= problem.length, "cos",
        [&] { return "a table of at least " + std::to_string(problem.length) + " positions"; }, cos);
  }
}

Positions checked_positions(const Tensor& positions, std::int64_t table, const RopeProblem& problem,
                            const Context& context) {
  if (!positions.given()) return {};
  check(
      positions.rank == 2 && (positions.extent(0) == 1 || positions.extent(0) == problem.batch) &&
          positions.extent(1) == problem.length,
      "positions",
      [&] {
        return "[B|1, S] with B " + std::to_string(problem.batch) + " and S " +
               std::to_string(problem.length);
      },
      positions);
  check(positions.dtype == DType::i32 || positions.dtype == DType::i64, "positions", "i32 or i64",
        to_string(positions.dtype));
  check_memory(positions, "positions", context);
  // A CPU call names the first position that is outside.
  check(context.device.type == Device::Type::cpu || table >= 1 || problem.batch * problem.length == 0, "cos",
        "a table of at least one position", "an empty one");
  return {.data = positions.data,
          .wide = positions.dtype == DType::i64,
          .stride_b = positions.extent(0) == 1 ? 0 : positions.stride(0),
          .stride_s = positions.stride(1)};
}

void check_output(const Tensor& output, std::string_view name, const Tensor& input, const Context& context) {
  if (!output.given()) return;
  check(input.given(), name, "an input to rotate", "none");
  check(
      same_shape(output, input), name, [&] { return "the shape of its input, " + shape_string(input); },
      output);
  check_dtype(output, name, input.dtype);
  check_memory(output, name, context);
  check_contiguous_last(output, name);
}

void check_cache(const RopeInputs& inputs, const RopeOutputs& outputs, const Context& context,
                 RopeCall& call) {
  RopeProblem& problem = call.problem;
  const Tensor& k_cache = outputs.k_cache;
  check(inputs.v.given() == outputs.v_cache.given(), "v_cache", "both v and v_cache, or neither",
        inputs.v.given() ? "only v" : "only v_cache");
  if (!k_cache.given()) {
    check(!outputs.v_cache.given(), "k_cache", "both k_cache and v_cache, or neither", "only v_cache");
    check(!inputs.page_table.given(), "page_table", "none without a cache", inputs.page_table);
    check(!inputs.cache_starts.given(), "cache_starts", "none without a cache", inputs.cache_starts);
    check(!inputs.cache_ends.given(), "cache_ends", "none without a cache", inputs.cache_ends);
    return;
  }
  check(inputs.k.given(), "k_cache", "k to write", "no k");
  const bool paged = inputs.page_table.given();
  problem.cache = paged ? CacheLayout::paged : CacheLayout::dense;
  const auto check_one = [&](const Tensor& cache, std::string_view name, std::int64_t dim) {
    check(cache.rank == 4, name, paged ? "rank 4 [pages, Hkv, page, D]" : "rank 4 [B, Hkv, C, D]", cache);
    check(
        cache.extent(1) == problem.heads_kv && cache.extent(3) == dim, name,
        [&] { return std::to_string(problem.heads_kv) + " heads of dim " + std::to_string(dim); }, cache);
    check(
        paged || cache.extent(0) == problem.batch, name,
        [&] { return "batch " + std::to_string(problem.batch); }, cache);
    check_dtype(cache, name, problem.dtype);
    check_memory(cache, name, context);
    check_contiguous_last(cache, name);
  };
  check_one(k_cache, "k_cache", problem.dim);
  if (outputs.v_cache.given()) {
    check_one(outputs.v_cache, "v_cache", problem.dim_v);
    check(
        outputs.v_cache.extent(0) == k_cache.extent(0) && outputs.v_cache.extent(2) == k_cache.extent(2),
        "v_cache", [&] { return "the first and third extent of k_cache, " + shape_string(k_cache); },
        outputs.v_cache);
  }
  if (inputs.cache_starts.given()) {
    check_dtype(inputs.cache_starts, "cache_starts", DType::i32);
    check_shape(inputs.cache_starts, "cache_starts", {problem.batch}, "[B]", context);
    call.cache_starts = indices_of(inputs.cache_starts);
  }
  if (inputs.cache_ends.given()) {
    check(!inputs.cache_starts.given(), "cache_ends", "none with cache_starts", inputs.cache_ends);
    check_dtype(inputs.cache_ends, "cache_ends", DType::i32);
    check_shape(inputs.cache_ends, "cache_ends", {problem.batch}, "[B]", context);
    call.cache_starts = indices_of(inputs.cache_ends);
    call.starts_are_ends = true;
    call.angles_of_places = inputs.cos.rank == 2 && !inputs.positions.given();
  }
  call.capacity = k_cache.extent(2);
  if (paged) {
    check(
        inputs.page_table.rank == 2 && inputs.page_table.extent(0) == problem.batch, "page_table",
        [&] { return "[B, max_pages] with B " + std::to_string(problem.batch); }, inputs.page_table);
    check_dtype(inputs.page_table, "page_table", DType::i32);
    check_memory(inputs.page_table, "page_table", context);
    check(k_cache.extent(2) >= 1, "k_cache", "pages of at least one token", k_cache);
    call.page_table = indices_of(inputs.page_table);
    call.page = k_cache.extent(2);
    call.pages = k_cache.extent(0);
    call.capacity = bounded_product(call.capacity, inputs.page_table.extent(1));
  }
}

// Throws the exception for a fault; returns if there is none.
void raise(const RopeFault& fault, const RopeCall& call) {
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  switch (fault.rule) {
    case RopeRule::none: return;
    case RopeRule::position:
      reject("positions", "positions from 0 to " + number(call.angle_rows - 1), fault.value);
    case RopeRule::room:
      reject(call.cache_starts.data == nullptr ? "k_cache"
             : call.starts_are_ends            ? "cache_ends"
                                               : "cache_starts",
             "room for " + number(call.problem.length) + " tokens from position " + number(fault.value),
             "a cache of " + number(call.capacity) + " tokens for batch entry " + number(fault.place[0]));
    case RopeRule::angles:
      reject("cos", "a table of at least " + number(fault.value) + " positions",
             Tensor(nullptr, call.cos.dtype, std::array{call.angle_rows, call.problem.rotary_dim / 2}));
    case RopeRule::page: reject("page_table", "pages from 0 to " + number(call.pages - 1), fault.value);
  }
}

}  // namespace

void check_indices(const RopeCall& call, const Context& context) {
  if (context.device.type == Device::Type::cpu) {
    const RopeIndices indices(call);
    const std::int64_t items = indices.items();
    for (std::int64_t item = 0; item < items; ++item) raise(indices.fault(item), call);
    return;
  }
#ifdef TILEWISE_HAS_CUDA
  if (checks_indices(context)) raise(cuda::first_fault(RopeIndices(call), context), call);
#endif
}

RopeCall checked_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                      const Context& context, Contents contents) {
  check_kernel_name(rope_kernel_list(), options.kernel);
  check_context(context);
  check_enumerator(options.pairs, RopePairs::interleaved, "pairs", "halves or interleaved");
  RopeCall call;
  RopeProblem& problem = call.problem;
  problem.pairs = options.pairs;
  problem.inverse = options.inverse;
  check_heads(inputs, context, problem);
  check_angles(inputs, context, problem);
  call.angle_rows = inputs.cos.extent(0);
  call.positions = checked_positions(inputs.positions, call.angle_rows, problem, context);
  check(inputs.q.given() == outputs.q.given(), "q", "both an input and an output, or neither",
        inputs.q.given() ? "only an input" : "only an output");
  check(!inputs.k.given() || outputs.k.given() || outputs.k_cache.given(), "k",
        "an output or a cache to write to", "neither");
  check_output(outputs.q, "q", inputs.q, context);
  check_output(outputs.k, "k", inputs.k, context);
  check_cache(inputs, outputs, context, call);

  const Tensor none;
  check_written({{"output q", &outputs.q},
                 {"output k", &outputs.k},
                 {"k_cache", &outputs.k_cache},
                 {"v_cache", &outputs.v_cache}},
                {{"q", same_view(inputs.q, outputs.q) ? &none : &inputs.q},
                 {"k", same_view(inputs.k, outputs.k) ? &none : &inputs.k},
                 {"v", &inputs.v},
                 {"cos", &inputs.cos},
                 {"sin", &inputs.sin},
                 {"positions", &inputs.positions},
                 {"cache_starts", &inputs.cache_starts},
                 {"cache_ends", &inputs.cache_ends},
                 {"page_table", &inputs.page_table}});
  call.q = rows_of(inputs.q);
  call.k = rows_of(inputs.k);
  call.v = rows_of(inputs.v);
  call.out_q = rows_of(outputs.q);
  call.out_k = rows_of(outputs.k);
  call.k_cache = rows_of(outputs.k_cache);
  call.v_cache = rows_of(outputs.v_cache);
  call.cos = angles_of(inputs.cos);
  call.sin = angles_of(inputs.sin);
  problem.aligned = true;
  for (const Tensor* tensor : {&inputs.q, &inputs.k, &inputs.v, &outputs.q, &outputs.k, &outputs.k_cache,
                               &outputs.v_cache, &inputs.cos, &inputs.sin}) {
    problem.aligned = problem.aligned && (!tensor->given() || has_aligned_rows(*tensor));
  }
  const bool begins_at_0 = problem.cache != CacheLayout::none && call.cache_starts.data == nullptr;
  if (context.device.type == Device::Type::cpu) {
    if (contents == Contents::checked) check_indices(call, context);
  } else if (begins_at_0 && problem.batch > 0 && problem.length > call.capacity) {
    raise({.rule = RopeRule::room}, call);
  }
  return call;
}

}  // namespace tilewise
