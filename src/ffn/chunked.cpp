#include <algorithm>
#include <limits>

#include "core/arena.h"
#include "ffn/kernel.h"
#include "ffn/steps.h"
#include "gemm/compose.h"
#include "gemm/products.h"

namespace tilewise {
namespace {

// Kernel `chunked`. Forward takes tokens in chunks: h of a chunk is computed and used before the next one.
// Backward takes hidden features in chunks instead. Then each gradient of a weight is complete after one GEMM
// over all tokens, and only dx is accumulated over chunks.

/// The bound of the intermediate results if the caller sets none: large enough that GEMMs run at full speed,
/// small enough to be little beside the weights.
constexpr std::size_t default_intermediate_bytes = std::size_t{512} << 20;

/// Chunks of fewer hidden features would round dx too often and make GEMMs with too small a K.
constexpr std::int64_t least_features = 64;

// How many items (tokens or hidden features) a chunk has: as many as the bound allows, a multiple of `least`
// and at least that.
std::int64_t items_per_chunk(std::size_t bound, std::int64_t bytes_per_item, std::int64_t items,
                             std::int64_t least) {
  const auto bytes = static_cast<std::int64_t>(
      std::min<std::size_t>(bound == 0 ? default_intermediate_bytes : bound,
                            static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())));
  const std::int64_t most = bytes / std::max<std::int64_t>(bytes_per_item, 1);
  if (most >= items) return std::max<std::int64_t>(items, 1);
  return std::max(most / least * least, least);
}

Matrix row_major(std::byte* data, DType dtype, std::int64_t rows, std::int64_t columns) {
  return {.data = data,
          .dtype = dtype,
          .rows = rows,
          .columns = columns,
          .stride_row = std::max<std::int64_t>(columns, 1)};
}

Vector vector_from(const Vector& vector, std::int64_t first) {
  Vector shifted = vector;
  if (shifted.data != nullptr) {
    shifted.data += first * shifted.stride * static_cast<std::int64_t>(size_of(shifted.dtype));
  }
  return shifted;
}

// `count` columns from `first` on.
Matrix columns_from(const Matrix& matrix, std::int64_t first, std::int64_t count) {
  return matrix.transposed().rows_from(first, count).transposed();
}

struct Forward {
  std::int64_t chunk;  // tokens
  Matrix h;            // [chunk, F], the activated products
};

Forward plan_forward(const FfnCall& call, Arena& arena) {
  const FfnProblem& problem = call.problem;
  const auto width = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t chunk =
      items_per_chunk(call.max_intermediate_bytes, problem.hidden * width, problem.tokens, 1);
  auto* h = arena.take<std::byte>(chunk, problem.hidden, width);
  return {chunk, row_major(h, problem.dtype, chunk, problem.hidden)};
}

GemmCall up_product(const FfnCall& call, const Forward& plan, std::int64_t first, std::int64_t count) {
  return gemm_call(call.problem.device, call.x.rows_from(first, count), call.up, plan.h.rows_from(0, count),
                   {.gate = call.gate,
                    .bias = call.up_bias,
                    .gate_bias = call.gate_bias,
                    .activation = call.problem.activation,
                    .allow_tf32 = call.problem.allow_tf32});
}

// The GEMM of one of the products before the activation, for forward passes that keep them.
GemmCall kept_product(const FfnCall& call, const Matrix& weight, const Vector& bias, const Matrix& to,
                      std::int64_t first, std::int64_t count) {
  return gemm_call(call.problem.device, call.x.rows_from(first, count), weight, to.rows_from(first, count),
                   {.bias = bias, .allow_tf32 = call.problem.allow_tf32});
}

GemmCall down_product(const FfnCall& call, const Forward& plan, std::int64_t first, std::int64_t count) {
  return gemm_call(call.problem.device, plan.h.rows_from(0, count), call.down,
                   call.out.rows_from(first, count),
                   {.residual = call.problem.residual ? call.residual.rows_from(first, count) : Matrix(),
                    .bias = call.down_bias,
                    .allow_tf32 = call.problem.allow_tf32});
}

// `count` columns of a product's result from `first` on.
GemmCall columns_of(const GemmCall& call, std::int64_t first, std::int64_t count) {
  const GemmProblem& problem = call.problem;
  return gemm_call(problem.device, call.a, call.b.rows_from(first, count),
                   columns_from(call.out, first, count),
                   {.gate = problem.gated ? call.gate.rows_from(first, count) : Matrix(),
                    .residual = problem.residual ? columns_from(call.residual, first, count) : Matrix(),
                    .bias = vector_from(call.bias, first),
                    .gate_bias = vector_from(call.gate_bias, first),
                    .activation = problem.activation,
                    .accumulate = problem.accumulate,
                    .allow_tf32 = problem.allow_tf32});
}

/// How many columns of a GEMM are computed at once: as many as need no more workspace than the caller's
/// bound. Kernels for f32 keep split copies of the weights there. If fewer columns would need about as much,
/// all are computed at once.
std::int64_t columns_at_once(const GemmCall& whole, std::size_t bound, const Products& products) {
  constexpr std::int64_t least = 128;  // fewer are not worth a launch
  const std::int64_t n = whole.problem.n;
  if (bound == 0 || n <= least || whole.problem.device.type != Device::Type::cuda) return n;
  const auto bytes = [&](std::int64_t count) { return products.workspace(columns_of(whole, 0, count)); };
  const std::size_t all = bytes(n);
  if (all <= bound || 2 * bytes(least) > all) return n;
  std::int64_t count = n;
  for (std::int64_t chunks = 2; count > least && bytes(count) > bound; chunks *= 2) {
    count = std::max((n / chunks + least - 1) / least * least, least);
  }
  return count;
}

template <typename Product>
void walk_columns(const GemmCall& whole, std::size_t bound, const Products& products,
                  const Product& product) {
  const std::int64_t n = whole.problem.n, count = columns_at_once(whole, bound, products);
  if (count == n) return product(whole);
  for (std::int64_t first = 0; first < n; first += count) {
    product(columns_of(whole, first, std::min(count, n - first)));
  }
}

// Calls product(GemmCall) and activate(ActivationPass) in the order in which forward runs them, for tokens
// first up to first + count.
template <typename Product, typename Activate>
void walk_tokens(const FfnCall& call, const Forward& plan, std::int64_t first, std::int64_t count,
                 const Product& product, const Activate& activate) {
  if (!call.problem.kept) {
    product(up_product(call, plan, first, count));
  } else {
    ActivationPass pass{.activation = call.problem.activation,
                        .up = call.up_product.rows_from(first, count),
                        .gate = {},
                        .dh = {},
                        .h = plan.h.rows_from(0, count),
                        .d_up = {},
                        .d_gate = {}};
    product(kept_product(call, call.up, call.up_bias, call.up_product, first, count));
    if (call.problem.gated) {
      product(kept_product(call, call.gate, call.gate_bias, call.gate_product, first, count));
      pass.gate = call.gate_product.rows_from(first, count);
    }
    activate(pass);
  }
  product(down_product(call, plan, first, count));
}

void forward(const FfnCall& call, const Context& context) {
  Arena arena(context.workspace.data);
  const Forward plan = plan_forward(call, arena);
  const Products products(context);
  for (std::int64_t first = 0; first < call.problem.tokens; first += plan.chunk) {
    walk_tokens(
        call, plan, first, std::min(plan.chunk, call.problem.tokens - first),
        [&](const GemmCall& whole) {
          walk_columns(whole, call.max_intermediate_bytes, products,
                       [&](const GemmCall& product) { products.launch(product, arena.rounded()); });
        },
        [&](const ActivationPass& pass) {
          ffn_steps(call.problem.device.type)->activation_pass(pass, context);
        });
  }
}

std::size_t forward_workspace(const FfnCall& call, const Context& context) {
  Arena arena(nullptr);
  const Forward plan = plan_forward(call, arena);
  const Products products(context);
  std::size_t most = 0;
  // The last chunk may be smaller, and another kernel may be chosen for it.
  const std::int64_t last = call.problem.tokens % plan.chunk;
  for (const std::int64_t count : {plan.chunk, last == 0 ? plan.chunk : last}) {
    walk_tokens(
        call, plan, 0, count,
        [&](const GemmCall& whole) {
          walk_columns(whole, call.max_intermediate_bytes, products,
                       [&](const GemmCall& product) { most = std::max(most, products.workspace(product)); });
        },
        [](const ActivationPass&) {});
  }
  arena.take<std::byte>(most);
  return arena.used();
}

struct Backward {
  std::int64_t chunk;   // hidden features
  Matrix up, gate, dh;  // [M, chunk]
  Matrix dx;            // [M, E]: the call's dx, or an f32 copy if 16-bit dx is accumulated over chunks
};

Backward plan_backward(const FfnCall& call, Arena& arena) {
  const FfnProblem& problem = call.problem;
  const auto width = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t matrices = problem.gated ? 3 : 2;
  Backward plan;
  plan.chunk = items_per_chunk(call.max_intermediate_bytes, matrices * problem.tokens * width, problem.hidden,
                               least_features);
  const auto take = [&](bool needed) {
    auto* data = arena.take<std::byte>(needed ? problem.tokens : 0, plan.chunk, width);
    return row_major(needed ? data : nullptr, problem.dtype, problem.tokens, plan.chunk);
  };
  plan.up = take(true);
  plan.gate = take(problem.gated);
  plan.dh = take(true);
  const bool accumulates_dx = call.dx.data != nullptr && plan.chunk < problem.hidden &&
                              problem.dtype != DType::f64 && problem.dtype != DType::f32;
  auto* dx =
      reinterpret_cast<std::byte*>(arena.take<float>(accumulates_dx ? problem.tokens * problem.embed : 0));
  plan.dx = accumulates_dx ? row_major(dx, DType::f32, problem.tokens, problem.embed) : call.dx;
  return plan;
}

// Calls product(GemmCall), activate(ActivationPass) and sum(Matrix, Vector) in the order in which backward
// runs them, for hidden features first up to first + count.
template <typename Product, typename Activate, typename Sum>
void walk_chunk(const FfnCall& call, const Backward& plan, std::int64_t first, std::int64_t count,
                const Product& product, const Activate& activate, const Sum& sum) {
  const FfnProblem& problem = call.problem;
  const bool tf32 = problem.allow_tf32;
  // The activation pass writes the gradients of both products to `up` and `gate`, and h to `dh`.
  const Matrix up = columns_from(plan.up, 0, count), dh = columns_from(plan.dh, 0, count);
  const Matrix gate = columns_from(plan.gate, 0, count);
  const Matrix up_rows = call.up.rows_from(first, count);
  const Matrix gate_rows = problem.gated ? call.gate.rows_from(first, count) : Matrix();
  const auto multiply = [&](const Matrix& a, const Matrix& b, const Matrix& out, const GemmParts& options) {
    if (out.data != nullptr) product(gemm_call(problem.device, a, b, out, options));
  };
  if (!problem.kept) {
    multiply(call.x, up_rows, up, {.bias = vector_from(call.up_bias, first), .allow_tf32 = tf32});
    multiply(call.x, gate_rows, gate, {.bias = vector_from(call.gate_bias, first), .allow_tf32 = tf32});
  }
  multiply(call.d_out, call.down.transposed().rows_from(first, count), dh, {.allow_tf32 = tf32});
  activate(ActivationPass{.activation = problem.activation,
                          .up = problem.kept ? columns_from(call.up_product, first, count) : up,
                          .gate = problem.kept ? columns_from(call.gate_product, first, count) : gate,
                          .dh = dh,
                          .h = dh,
                          .d_up = up,
                          .d_gate = gate});
  if (call.d_down.data != nullptr) {
    multiply(call.d_out.transposed(), dh.transposed(), columns_from(call.d_down, first, count),
             {.allow_tf32 = tf32});
  }
  const auto weight_gradients = [&](const Matrix& d_product, const Matrix& rows, const Matrix& d_weight,
                                    const Vector& d_bias, bool add_to_dx) {
    multiply(d_product.transposed(), call.x.transposed(),
             d_weight.data == nullptr ? d_weight : d_weight.rows_from(first, count), {.allow_tf32 = tf32});
    multiply(d_product, rows.transposed(), plan.dx, {.accumulate = add_to_dx, .allow_tf32 = tf32});
    if (d_bias.data != nullptr) sum(d_product, vector_from(d_bias, first));
  };
  weight_gradients(up, up_rows, call.d_up, call.d_up_bias, first > 0);
  if (problem.gated) weight_gradients(gate, gate_rows, call.d_gate, call.d_gate_bias, true);
}

void backward(const FfnCall& call, const Context& context) {
  const FfnSteps& steps = *ffn_steps(call.problem.device.type);
  Arena arena(context.workspace.data);
  const Backward plan = plan_backward(call, arena);
  const Products products(context);
  const Context remaining = products.remaining_workspace(arena.rounded());
  const auto sum = [&](const Matrix& x, const Vector& sums) { steps.sum_rows(x, sums, remaining); };
  // Without hidden features there is one empty chunk, which sets dx to 0.
  for (std::int64_t first = 0; first == 0 || first < call.problem.hidden; first += plan.chunk) {
    walk_chunk(
        call, plan, first, std::min(plan.chunk, call.problem.hidden - first),
        [&](const GemmCall& product) { products.launch(product, arena.rounded()); },
        [&](const ActivationPass& pass) { steps.activation_pass(pass, remaining); }, sum);
  }
  if (call.d_down_bias.data != nullptr) sum(call.d_out, call.d_down_bias);
  if (plan.dx.data != call.dx.data) steps.round(plan.dx, call.dx, remaining);
}

std::size_t backward_workspace(const FfnCall& call, const Context& context) {
  const FfnSteps& steps = *ffn_steps(call.problem.device.type);
  Arena arena(nullptr);
  Backward plan = plan_backward(call, arena);
  // The workspace is asked for the GEMMs as they will be launched: their tensors are not null and have the
  // alignment of the workspace.
  auto* const not_null = reinterpret_cast<std::byte*>(workspace_alignment);
  for (Matrix* matrix : {&plan.up, &plan.dh}) matrix->data = not_null;
  if (call.problem.gated) plan.gate.data = not_null;
  if (call.dx.data != nullptr && plan.dx.data == nullptr) plan.dx.data = not_null;
  const Products products(context);
  std::size_t most = call.d_down_bias.data == nullptr ? 0 : steps.sum_rows_workspace(call.d_out, context);
  const std::int64_t last = call.problem.hidden % plan.chunk;
  for (const std::int64_t count : {plan.chunk, last == 0 ? plan.chunk : last}) {
    walk_chunk(
        call, plan, std::max<std::int64_t>(call.problem.hidden - count, 0),
        std::min(count, call.problem.hidden),
        [&](const GemmCall& product) { most = std::max(most, products.workspace(product)); },
        [](const ActivationPass&) {},
        [&](const Matrix& x, const Vector&) { most = std::max(most, steps.sum_rows_workspace(x, context)); });
  }
  arena.take<std::byte>(most);
  return arena.used();
}

std::string supports(const FfnProblem& problem) {
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if ((problem.pass == Pass::backward || problem.kept) && ffn_steps(problem.device.type) == nullptr) {
    return "this build has no kernel for activations on " + to_string(problem.device);
  }
  // The first of the GEMMs that the network consists of.
  const GemmProblem product{.device = problem.device,
                            .dtype = problem.dtype,
                            .out_dtype = problem.dtype,
                            .m = problem.tokens,
                            .n = problem.hidden,
                            .k = problem.embed,
                            .b_by_rows = problem.by_rows,
                            .activation = problem.activation,
                            .gated = problem.gated,
                            .bias = problem.bias,
                            .allow_tf32 = problem.allow_tf32,
                            .aligned = problem.aligned};
  for (const GemmKernel& kernel : gemm_kernel_list()) {
    if (kernel.supports(product).empty()) return {};
  }
  return "no kernel of gemm computes its products on " + to_string(problem.device);
}

std::size_t workspace(const FfnCall& call, const Context& context) {
  return call.problem.pass == Pass::forward ? forward_workspace(call, context)
                                            : backward_workspace(call, context);
}

void launch(const FfnCall& call, const Context& context) {
  if (call.problem.pass == Pass::forward) {
    forward(call, context);
  } else {
    backward(call, context);
  }
}

}  // namespace

constinit const FfnKernel chunked_ffn = {
    .name = "chunked", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise
