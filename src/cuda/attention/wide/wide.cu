#include "cuda/attention/wide/wide.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/attention/simt/dense_rows.cuh"
#include "cuda/runtime/check.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/with_type.h"
#include "gemm/compose.h"
#include "gemm/products.h"

namespace tilewise::cuda::wide {
namespace {

constexpr int warp = 32;
constexpr int threads = 256;

/// What the matrices of a chunk of rows may take.
constexpr std::int64_t chunk_bytes = std::int64_t{256} << 20;
/// Rows a chunk has at the most where causal or a window hides keys from it as a whole: with fewer, products
/// have too few tiles for a GPU, and in f32 keys and values are split once more for each.
constexpr std::int64_t banded_rows = 2048;
/// Keys a chunk begins at are a multiple of this, so that rows of its matrices are aligned.
constexpr std::int64_t key_step = 64;

constexpr std::int64_t rounded_up(std::int64_t x) { return (x + key_step - 1) / key_step * key_step; }

std::int64_t rows_per_chunk(const AttentionCall& call, std::int64_t bytes_per_pair) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t row_bytes = rounded_up(problem.length_k) * bytes_per_pair;
  const std::int64_t most = std::max<std::int64_t>(chunk_bytes / row_bytes / key_step * key_step, key_step);
  const std::int64_t rows = call.band.bounded() ? std::min(most, banded_rows) : most;
  return std::min(rows, problem.length_q);
}

/// Some rows of one head, and the keys that any of them sees.
struct Chunk {
  std::int64_t b, h, first, count;
  KeyRange keys;

  std::int64_t width() const { return keys.last - keys.first; }
};

Chunk chunk_at(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t first,
               std::int64_t rows) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t count = std::min(rows, problem.length_q - first);
  const Sequence sequence = call.sequence(b);  // without lengths it reads no memory
  const KeyRange low = call.keys_of(sequence, first), high = call.keys_of(sequence, first + count - 1);
  const std::int64_t begin = std::clamp<std::int64_t>(low.first, 0, problem.length_k) / key_step * key_step;
  return {b, h, first, count, {begin, std::clamp(high.last, begin, problem.length_k)}};
}

/// Calls body(chunk) for all rows of head h of entry b.
template <typename Body>
void for_each_chunk(const AttentionCall& call, std::int64_t rows, std::int64_t b, std::int64_t h,
                    const Body& body) {
  for (std::int64_t first = 0; first < call.problem.length_q; first += rows) {
    body(chunk_at(call, b, h, first, rows));
  }
}

Matrix matrix_at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count,
                 std::int64_t dim) {
  return {.data = rows.at(b, h, first),
          .dtype = rows.dtype,
          .rows = count,
          .columns = dim,
          .stride_row = count > 1 ? rows.stride_s : std::max<std::int64_t>(dim, 1)};
}
Matrix plain_matrix(void* data, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t pitch) {
  return {.data = static_cast<std::byte*>(data),
          .dtype = dtype,
          .rows = rows,
          .columns = columns,
          .stride_row = pitch};
}

Launch warp_each(const char* name, std::int64_t rows, const Context& context) {
  return {.name = name,
          .blocks = (rows * warp + threads - 1) / threads,
          .threads = threads,
          .stream = static_cast<cudaStream_t>(context.stream)};
}

/// The products of a row's query with keys to weights, dropout included, and lse. A warp has a row. Weights
/// may be the memory of products: every lane keeps to its own keys.
template <typename T>
__global__ void __launch_bounds__(threads)
    weigh_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ Chunk chunk,
               float* products_gmem, T* weights_gmem, const std::int64_t pitch) {
  const std::int64_t own = simt::thread_index() / warp;
  if (own >= chunk.count) return;  // all lanes of a row together
  const int lane = threadIdx.x % warp;
  const AttentionFeatures& features = call.problem.features;
  const simt::QueryRow row(call, chunk.b, chunk.h, chunk.first + own);
  const ScoreRule rules(call, row.b, row.h);
  float* row_gmem = products_gmem + own * pitch - chunk.keys.first;
  T* out_gmem = weights_gmem + own * pitch - chunk.keys.first;

  const float sink = features.sinks ? static_cast<float>(call.sinks.at(row.b, row.h)) : minus_infinity;
  // From the lowest finite number, so that no difference is NaN in a row that sees nothing.
  float maximum = fmaxf(sink, lowest);
  for (std::int64_t j = chunk.keys.first + lane; j < chunk.keys.last; j += warp) {
    const float score = simt::pair_score(call, rules, row, j, row_gmem[j]);
    row_gmem[j] = score;
    maximum = fmaxf(maximum, score);
  }
  maximum = maximum_over<warp>(maximum);
  double sum = 0;
  for (std::int64_t j = chunk.keys.first + lane; j < chunk.keys.last; j += warp) {
    const float weight = expf(row_gmem[j] - maximum);
    row_gmem[j] = weight;
    sum += static_cast<double>(weight);
  }
  sum = sum_over<warp>(sum) + static_cast<double>(expf(sink - maximum));
  const bool empty = sum == 0;
  const auto inverse = static_cast<float>(empty ? 0.0 : 1 / sum);
  for (std::int64_t j = chunk.keys.first + lane; j < chunk.keys.last; j += warp) {
    const bool drawn = features.dropout && row.sees(j);
    const float kept = drawn ? dropout_factor(call, row.b, row.h, row.i, j) : 1.0f;
    out_gmem[j] = narrow<T>(row_gmem[j] * inverse * kept);
  }
  if (lane == 0 && call.lse.wanted) {
    const float lse = empty ? minus_infinity : maximum + logf(static_cast<float>(sum));
    *reinterpret_cast<float*>(call.lse.at(row.b, row.h, row.i)) = lse;
  }
}

/// Sums in f32, times a factor, to rows of a result.
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
  float* products;
  void* weights;  ///< where they are narrower; else the memory of products
  std::size_t used;

  ForwardSpace(const AttentionCall& call, void* base) : pitch(rounded_up(call.problem.length_k)) {
    const auto width = static_cast<std::int64_t>(size_of(call.problem.dtype));
    const bool apart = call.problem.dtype != DType::f32;
    rows = rows_per_chunk(call, 4 + (apart ? width : 0));
    Arena arena(base);
    products = arena.take<float>(rows * pitch);
    weights = apart ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(products);
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
      problem.device, plain_matrix(space.weights, problem.dtype, chunk.count, chunk.width(), space.pitch),
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
        products.launch(
            score_product(call, chunk, call.q, call.k, problem.dim_qk, space.products, space.pitch),
            space.used);
        launch<weigh_rows<T>>(warp_each("tilewise wide weights", chunk.count, context), call, chunk,
                              space.products, static_cast<T*>(space.weights), space.pitch);
        products.launch(output_product(call, chunk, space), space.used);
      });
    }
  }
}

/// Each product that a pass makes of a head: calls visit(GemmCall).
template <typename Visit>
void for_each_product(const AttentionCall& call, const ForwardSpace& space, std::int64_t b, std::int64_t h,
                      const Visit& visit) {
  for_each_chunk(call, space.rows, b, h, [&](const Chunk& chunk) {
    visit(score_product(call, chunk, call.q, call.k, call.problem.dim_qk, space.products, space.pitch));
    visit(output_product(call, chunk, space));
  });
}

struct BackwardSpace {
  std::int64_t rows, pitch;
  float *products, *dweights;
  void *weights, *dproducts;  ///< where they are narrower; else the memory of the two above
  void *weights_rest = nullptr, *dproducts_rest = nullptr;  ///< then what rounding took from these
  float *sink_parts, *row_sums;
  float *dq, *dk, *dv;  ///< [rows, D], [Sk, D] and [Sk, Dv], in f32 and without their factor
  std::size_t used;

  BackwardSpace(const AttentionCall& call, void* base) : pitch(rounded_up(call.problem.length_k)) {
    const AttentionProblem& problem = call.problem;
    const auto width = static_cast<std::int64_t>(size_of(problem.dtype));
    const bool apart = problem.dtype != DType::f32;
    rows = rows_per_chunk(call, 8 + (apart ? 4 * width : 0));
    Arena arena(base);
    products = arena.take<float>(rows * pitch);
    dweights = arena.take<float>(rows * pitch);
    weights = apart ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(products);
    dproducts = apart ? arena.take<std::byte>(rows * pitch * width) : static_cast<void*>(dweights);
    if (apart) {
      weights_rest = arena.take<std::byte>(rows * pitch * width);
      dproducts_rest = arena.take<std::byte>(rows * pitch * width);
    }
    sink_parts = arena.take<float>(problem.heads_q * call.rows_q());
    row_sums = arena.take<float>(problem.heads_q * call.rows_q());
    dq = arena.take<float>(rows * rounded_up(problem.dim_qk));
    dk = arena.take<float>(problem.length_k * rounded_up(problem.dim_qk));
    dv = arena.take<float>(problem.length_k * rounded_up(problem.dim_v));
    used = arena.rounded();
  }
};

/// The gradients' products of a chunk: calls visit(GemmCall) for those that are asked for. Weights and score
/// gradients of 16 bits have two parts, each with its product: a few of them may be all that a sum has, and
/// what rounding takes from those shows in the result.
template <typename Visit>
void for_each_gradient(const AttentionCall& call, const Chunk& chunk, const BackwardSpace& space,
                       const Visit& visit) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t h_kv = call.key_head(chunk.h);
  const auto pairs = [&](void* data) {
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
    visit(gemm_call(problem.device, pairs(space.dproducts), keys, dq, set));
    if (space.dproducts_rest != nullptr) {
      visit(gemm_call(problem.device, pairs(space.dproducts_rest), keys, dq, add));
    }
  }
  const auto add_to_keys = [&](void* high, void* rest, const Matrix& rows, float* to, std::int64_t dim) {
    for (void* part : {high, rest}) {
      if (part == nullptr) continue;
      visit(gemm_call(problem.device, pairs(part).transposed(), rows,
                      sums(to, chunk.keys.first, chunk.width(), dim), add));
    }
  };
  if (call.dk.wanted) {
    add_to_keys(space.dproducts, space.dproducts_rest, queries(call.q, problem.dim_qk), space.dk,
                problem.dim_qk);
  }
  if (call.dv.wanted) {
    add_to_keys(space.weights, space.weights_rest, queries(call.d_o, problem.dim_v), space.dv, problem.dim_v);
  }
}

template <typename Visit>
void for_each_product(const AttentionCall& call, const BackwardSpace& space, std::int64_t b, std::int64_t h,
                      const Visit& visit) {
  const AttentionProblem& problem = call.problem;
  for_each_chunk(call, space.rows, b, h, [&](const Chunk& chunk) {
    visit(score_product(call, chunk, call.q, call.k, problem.dim_qk, space.products, space.pitch));
    visit(score_product(call, chunk, call.d_o, call.v, problem.dim_v, space.dweights, space.pitch));
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
  products.launch(score_product(call, chunk, call.q, call.k, problem.dim_qk, space.products, space.pitch),
                  space.used);
  products.launch(score_product(call, chunk, call.d_o, call.v, problem.dim_v, space.dweights, space.pitch),
                  space.used);
  const simt::PairRows<T> rows{
      .first = (chunk.b * problem.heads_q + chunk.h) * problem.length_q + chunk.first,
      .count = chunk.count,
      .keys = chunk.keys,
      .pitch = space.pitch,
      .products = space.products,
      .dweights = space.dweights,
      .weights = static_cast<T*>(space.weights),
      .dproducts = static_cast<T*>(space.dproducts),
      .weights_rest = static_cast<T*>(space.weights_rest),
      .dproducts_rest = static_cast<T*>(space.dproducts_rest),
      .dscores = nullptr,
      .sink_parts = space.sink_parts,
      .row_sums = space.row_sums};
  launch<simt::differentiate_rows<warp, T>>(warp_each("tilewise wide score gradients", chunk.count, context),
                                            call, rows);
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
                                  space.sink_parts);
  }
}

/// Whether all heads are aligned as the first is, so that the same kernels take their products.
bool heads_are_alike(const AttentionCall& call) {
  const auto alike = [](const Rows& rows) {
    const auto bytes = static_cast<std::int64_t>(size_of(rows.dtype));
    return !rows.wanted || (rows.stride_b * bytes % 16 == 0 && rows.stride_h * bytes % 16 == 0);
  };
  return alike(call.q) && alike(call.k) && alike(call.v) && alike(call.o) && alike(call.d_o);
}

template <typename Space>
std::size_t workspace_of(const AttentionCall& call, const Context& context) {
  // Aligned as it will be, at an address where no memory can be: no product reads it.
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
