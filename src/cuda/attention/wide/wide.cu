#include "cuda/attention/wide/wide.h"

#include "core/arena.h"
#include "cuda/attention/wide/rows.cuh"
#include "cuda/runtime/check.h"
#include "cuda/tile/with_type.h"
#include "gemm/compose.h"
#include "gemm/products.h"

namespace tilewise::cuda::wide {
namespace {

/// With fewer rows in a chunk, products have too few tiles for a GPU, and in f32 each chunk splits K and V
/// into parts again.
constexpr std::int64_t banded_rows = 2048;

/// Calls body(chunk) for all rows of head h of entry b.
template <typename Body>
void for_each_chunk(const AttentionCall& call, std::int64_t rows, std::int64_t b, std::int64_t h,
                    const Body& body) {
  for (std::int64_t first = 0; first < call.problem.length_q; first += rows) {
    body(chunk_at(call, b, h, first, rows));
  }
}

/// Multiplies f32 sums by a factor and rounds them to the type of the result.
template <typename T>
__global__ void __launch_bounds__(threads)
    finish_rows(const __grid_constant__ Matrix sums, const __grid_constant__ Matrix to, const float factor) {
  const std::int64_t index = simt::thread_index();
  const std::int64_t m = index / sums.columns, n = index % sums.columns;
  if (m >= sums.rows) return;
  *reinterpret_cast<T*>(to.at(m, n)) = narrow<T>(factor * *reinterpret_cast<const float*>(sums.at(m, n)));
}

struct ForwardSpace {
  std::int64_t rows, pitch;
  float* qk;
  void* p;  ///< of 16 bits; in f32 it overwrites qk
  std::size_t used;

  ForwardSpace(const AttentionCall& call, void* base) : pitch(rounded_up(call.problem.length_k)) {
    const auto width = static_cast<std::int64_t>(size_of(call.problem.dtype));
    const bool is_16_bit = call.problem.dtype != DType::f32;
    rows = rows_per_chunk(call, 4 + (is_16_bit ? width : 0), banded_rows);
    Arena arena(base);
    qk = arena.take<float>(rows * pitch);
    p = is_16_bit ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(qk);
    used = arena.rounded();
  }
};

GemmCall score_product(const AttentionCall& call, const Chunk& chunk, const Rows& queries, const Rows& keys,
                       std::int64_t dim, float* to, std::int64_t pitch) {
  return gemm_call(call.problem.device, matrix_at(queries, chunk.b, chunk.h, chunk.first, chunk.count, dim),
                   matrix_at(keys, chunk.b, call.key_head(chunk.h), chunk.keys.first, chunk.width(), dim),
                   plain_matrix(to, DType::f32, chunk.count, chunk.width(), pitch),
                   {.allow_tf32 = call.allow_tf32});
}

GemmCall output_product(const AttentionCall& call, const Chunk& chunk, const ForwardSpace& space) {
  const AttentionProblem& problem = call.problem;
  return gemm_call(
      problem.device, plain_matrix(space.p, problem.dtype, chunk.count, chunk.width(), space.pitch),
      matrix_at(call.v, chunk.b, call.key_head(chunk.h), chunk.keys.first, chunk.width(), problem.dim_v)
          .transposed(),
      matrix_at(call.o, chunk.b, chunk.h, chunk.first, chunk.count, problem.dim_v),
      {.allow_tf32 = call.allow_tf32});
}

template <typename T>
void forward_of(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const ForwardSpace space(call, context.workspace.data);
  const Products products(context);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      for_each_chunk(call, space.rows, b, h, [&](const Chunk& chunk) {
        products.launch(score_product(call, chunk, call.q, call.k, problem.dim_qk, space.qk, space.pitch),
                        space.used);
        launch<softmax_rows<T, Chunk>>(warp_each("tilewise wide P", chunk.count, context), call, chunk,
                                       space.qk, static_cast<T*>(space.p), space.pitch);
        products.launch(output_product(call, chunk, space), space.used);
      });
    }
  }
}

/// Calls visit(GemmCall) for each product of a head.
template <typename Visit>
void for_each_product(const AttentionCall& call, const ForwardSpace& space, std::int64_t b, std::int64_t h,
                      const Visit& visit) {
  for_each_chunk(call, space.rows, b, h, [&](const Chunk& chunk) {
    visit(score_product(call, chunk, call.q, call.k, call.problem.dim_qk, space.qk, space.pitch));
    visit(output_product(call, chunk, space));
  });
}

struct BackwardSpace {
  std::int64_t rows, pitch;
  float *qk, *dp;
  void *p, *dqk;                              ///< of 16 bits; in f32 they overwrite qk and dp
  void *p_low = nullptr, *dqk_low = nullptr;  ///< what rounding to 16 bits lost of these
  float *sink_terms, *row_sums;
  float *dq, *dk, *dv;  ///< [rows, D], [Sk, D] and [Sk, Dv], in f32, before the multiplication by the scale
  std::size_t used;

  BackwardSpace(const AttentionCall& call, void* base) : pitch(rounded_up(call.problem.length_k)) {
    const AttentionProblem& problem = call.problem;
    const auto width = static_cast<std::int64_t>(size_of(problem.dtype));
    const bool is_16_bit = problem.dtype != DType::f32;
    rows = rows_per_chunk(call, 8 + (is_16_bit ? 4 * width : 0), banded_rows);
    Arena arena(base);
    qk = arena.take<float>(rows * pitch);
    dp = arena.take<float>(rows * pitch);
    p = is_16_bit ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(qk);
    dqk = is_16_bit ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(dp);
    if (is_16_bit) {
      p_low = arena.take<std::byte>(rows * pitch * width);
      dqk_low = arena.take<std::byte>(rows * pitch * width);
    }
    sink_terms = arena.take<float>(problem.heads_q * call.rows_q());
    row_sums = arena.take<float>(problem.heads_q * call.rows_q());
    dq = arena.take<float>(rows * rounded_up(problem.dim_qk));
    dk = arena.take<float>(problem.length_k * rounded_up(problem.dim_qk));
    dv = arena.take<float>(problem.length_k * rounded_up(problem.dim_v));
    used = arena.rounded();
  }
};

/// Calls visit(GemmCall) for each product of a chunk that the wanted gradients need. P and dS of 16 bits come
/// in two parts, each with a product: a sum may consist of a few terms, and then their rounding would
/// show in the result.
template <typename Visit>
void for_each_gradient(const AttentionCall& call, const Chunk& chunk, const BackwardSpace& space,
                       const Visit& visit) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t h_kv = call.key_head(chunk.h);
  const auto chunk_matrix = [&](void* data) {
    return plain_matrix(data, problem.dtype, chunk.count, chunk.width(), space.pitch);
  };
  const GemmParts set{.allow_tf32 = call.allow_tf32}, add{.accumulate = true, .allow_tf32 = call.allow_tf32};
  const auto queries = [&](const Rows& rows, std::int64_t dim) {
    return matrix_at(rows, chunk.b, chunk.h, chunk.first, chunk.count, dim).transposed();
  };
  const auto sums = [&](float* data, std::int64_t first, std::int64_t count, std::int64_t dim) {
    const std::int64_t sum_pitch = rounded_up(dim);
    return plain_matrix(data + first * sum_pitch, DType::f32, count, dim, sum_pitch);
  };
  if (call.dq.wanted) {
    const Matrix keys =
        matrix_at(call.k, chunk.b, h_kv, chunk.keys.first, chunk.width(), problem.dim_qk).transposed();
    const Matrix dq = sums(space.dq, 0, chunk.count, problem.dim_qk);
    visit(gemm_call(problem.device, chunk_matrix(space.dqk), keys, dq, set));
    if (space.dqk_low != nullptr) {
      visit(gemm_call(problem.device, chunk_matrix(space.dqk_low), keys, dq, add));
    }
  }
  const auto add_to_keys = [&](void* high, void* low, const Matrix& rows, float* to, std::int64_t dim) {
    for (void* part : {high, low}) {
      if (part == nullptr) continue;
      visit(gemm_call(problem.device, chunk_matrix(part).transposed(), rows,
                      sums(to, chunk.keys.first, chunk.width(), dim), add));
    }
  };
  if (call.dk.wanted) {
    add_to_keys(space.dqk, space.dqk_low, queries(call.q, problem.dim_qk), space.dk, problem.dim_qk);
  }
  if (call.dv.wanted) {
    add_to_keys(space.p, space.p_low, queries(call.d_o, problem.dim_v), space.dv, problem.dim_v);
  }
}

template <typename Visit>
void for_each_product(const AttentionCall& call, const BackwardSpace& space, std::int64_t b, std::int64_t h,
                      const Visit& visit) {
  const AttentionProblem& problem = call.problem;
  for_each_chunk(call, space.rows, b, h, [&](const Chunk& chunk) {
    visit(score_product(call, chunk, call.q, call.k, problem.dim_qk, space.qk, space.pitch));
    visit(score_product(call, chunk, call.d_o, call.v, problem.dim_v, space.dp, space.pitch));
    for_each_gradient(call, chunk, space, visit);
  });
}

template <typename T>
void finish(const char* name, float* sums, const Rows& to, std::int64_t b, std::int64_t h, std::int64_t first,
            std::int64_t count, std::int64_t dim, double factor, const Context& context) {
  if (!to.wanted) return;
  launch<finish_rows<T>>({.name = name,
                          .blocks = (count * dim + threads - 1) / threads,
                          .threads = threads,
                          .stream = static_cast<cudaStream_t>(context.stream)},
                         plain_matrix(sums, DType::f32, count, dim, rounded_up(dim)),
                         matrix_at(to, b, h, first, count, dim), static_cast<float>(factor));
}

template <typename T>
void chunk_backward(const AttentionCall& call, const Chunk& chunk, const BackwardSpace& space,
                    const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Products products(context);
  products.launch(score_product(call, chunk, call.q, call.k, problem.dim_qk, space.qk, space.pitch),
                  space.used);
  products.launch(score_product(call, chunk, call.d_o, call.v, problem.dim_v, space.dp, space.pitch),
                  space.used);
  const simt::PairRows<T> rows{
      .first = (chunk.b * problem.heads_q + chunk.h) * problem.length_q + chunk.first,
      .count = chunk.count,
      .keys = chunk.keys,
      .pitch = space.pitch,
      .qk = space.qk,
      .dp = space.dp,
      .p = static_cast<T*>(space.p),
      .dqk = static_cast<T*>(space.dqk),
      .p_low = static_cast<T*>(space.p_low),
      .dqk_low = static_cast<T*>(space.dqk_low),
      .ds = nullptr,
      .sink_terms = space.sink_terms,
      .row_sums = space.row_sums};
  launch<simt::differentiate_rows<warp, T>>(warp_each("tilewise wide dS", chunk.count, context), call, rows);
  for_each_gradient(call, chunk, space,
                    [&](const GemmCall& product) { products.launch(product, space.used); });
  finish<T>("tilewise wide dq", space.dq, call.dq, chunk.b, chunk.h, chunk.first, chunk.count, problem.dim_qk,
            call.scale, context);
}

template <typename T>
void backward_of(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const BackwardSpace space(call, context.workspace.data);
  const auto clear = [&](float* sums, std::int64_t dim) {
    const std::int64_t bytes = problem.length_k * rounded_up(dim) * 4;
    check_cuda(
        cudaMemsetAsync(sums, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(context.stream)),
        "tilewise wide: clearing sums");
  };
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t h_kv = 0; h_kv < problem.heads_kv; ++h_kv) {
      if (call.dk.wanted) clear(space.dk, problem.dim_qk);
      if (call.dv.wanted) clear(space.dv, problem.dim_v);
      for (std::int64_t h = h_kv * call.group(); h < (h_kv + 1) * call.group(); ++h) {
        for_each_chunk(call, space.rows, b, h,
                       [&](const Chunk& chunk) { chunk_backward<T>(call, chunk, space, context); });
      }
      finish<T>("tilewise wide dk", space.dk, call.dk, b, h_kv, 0, problem.length_k, problem.dim_qk,
                call.scale, context);
      finish<T>("tilewise wide dv", space.dv, call.dv, b, h_kv, 0, problem.length_k, problem.dim_v, 1,
                context);
    }
  }
  if (call.dsinks != nullptr) {
    launch<simt::sum_sinks<warp>>(warp_each("tilewise wide dsinks", problem.heads_q, context), call,
                                  space.sink_terms);
  }
}

/// Whether all heads are aligned like the first one, so that the same kernels compute their products.
bool heads_are_alike(const AttentionCall& call) {
  const auto alike = [](const Rows& rows) {
    const auto bytes = static_cast<std::int64_t>(size_of(rows.dtype));
    return !rows.wanted || (rows.stride_b * bytes % 16 == 0 && rows.stride_h * bytes % 16 == 0);
  };
  return alike(call.q) && alike(call.k) && alike(call.v) && alike(call.o) && alike(call.d_o);
}

template <typename Space>
std::size_t workspace_of(const AttentionCall& call, const Context& context) {
  // A base that is aligned as the real one will be, at an address without memory: nothing reads it here.
  const Space space(call, reinterpret_cast<void*>(std::uintptr_t{1} << 60));
  const Products products(context);
  const bool alike = heads_are_alike(call);
  std::size_t most = 0;
  for (std::int64_t b = 0; b < (alike ? 1 : call.problem.batch); ++b) {
    for (std::int64_t h = 0; h < (alike ? 1 : call.problem.heads_q); ++h) {
      for_each_product(call, space, b, h,
                       [&](const GemmCall& product) { most = std::max(most, products.workspace(product)); });
    }
  }
  return space.used + most;
}

}  // namespace

void forward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { forward_of<T>(call, context); });
}

void backward(const AttentionCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { backward_of<T>(call, context); });
}

std::size_t forward_workspace(const AttentionCall& call, const Context& context) {
  return workspace_of<ForwardSpace>(call, context);
}
std::size_t backward_workspace(const AttentionCall& call, const Context& context) {
  return workspace_of<BackwardSpace>(call, context);
}

}  // namespace tilewise::cuda::wide
