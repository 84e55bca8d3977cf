#include "cuda/attention/widened/widened.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::widened {
namespace {

constexpr int threads = 256;
constexpr int most_tensors = 4;

// A tensor and the tensor of another type that it is copied to.
struct CopiedRows {
  Rows from, to;
  std::int64_t heads, rows, length;  // rows of a head, and rows of an entry of the batch
  std::int64_t dims;
};
struct CopiedTensors {
  CopiedRows tensor[most_tensors];
  int count = 0;

  void add(const Rows& from, const Rows& to, std::int64_t heads, std::int64_t rows, std::int64_t length,
           std::int64_t dims) {
    if (from.wanted && to.wanted) tensor[count++] = {from, to, heads, rows, length, dims};
  }
};

// One warp per row; the grid's second dimension counts the tensors.
__global__ void __launch_bounds__(threads) copy_rows(const __grid_constant__ CopiedTensors tensors) {
  const CopiedRows& own = tensors.tensor[blockIdx.y];
  const std::int64_t index = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / 32;
  const std::int64_t h = index / own.rows, row = index - h * own.rows;
  if (h >= own.heads) return;
  const std::int64_t b = row / own.length, s = row - b * own.length;
  const std::byte* from = own.from.at(b, h, s);
  std::byte* to = own.to.at(b, h, s);
  const auto from_size = static_cast<std::int64_t>(size_of(own.from.dtype));
  const auto to_size = static_cast<std::int64_t>(size_of(own.to.dtype));
  for (std::int64_t d = threadIdx.x % 32; d < own.dims; d += 32) {
    store_element(to + d * to_size, own.to.dtype, load_element(from + d * from_size, own.from.dtype));
  }
}

void copy(const CopiedTensors& tensors, const char* name, const Context& context) {
  std::int64_t rows = 0;
  for (int n = 0; n < tensors.count; ++n) {
    rows = std::max(rows, tensors.tensor[n].heads * tensors.tensor[n].rows);
  }
  launch<copy_rows>({.name = name,
                     .blocks = (rows * 32 + threads - 1) / threads,
                     .threads = threads,
                     .layers = std::max(1, tensors.count),
                     .stream = static_cast<cudaStream_t>(context.stream)},
                    tensors);
}

// Rows of an entry of a head. A packed tensor counts as one entry.
std::int64_t entry_rows(const AttentionCall& call, bool of_queries) {
  if (call.packed()) return std::max<std::int64_t>(1, of_queries ? call.total_q : call.total_k);
  return std::max<std::int64_t>(1, of_queries ? call.problem.length_q : call.problem.length_k);
}

CopiedTensors inputs_of(const AttentionCall& from, const AttentionCall& to) {
  const AttentionProblem& problem = from.problem;
  const std::int64_t rows_q = from.rows_q(), rows_k = from.rows_k();
  const std::int64_t length_q = entry_rows(from, true), length_k = entry_rows(from, false);
  CopiedTensors tensors;
  tensors.add(from.q, to.q, problem.heads_q, rows_q, length_q, problem.dim_qk);
  tensors.add(from.d_o, to.d_o, problem.heads_q, rows_q, length_q, problem.dim_v);
  tensors.add(from.k, to.k, problem.heads_kv, rows_k, length_k, problem.dim_qk);
  tensors.add(from.v, to.v, problem.heads_kv, rows_k, length_k, problem.dim_v);
  return tensors;
}
CopiedTensors results_of(const AttentionCall& from, const AttentionCall& to) {
  const AttentionProblem& problem = from.problem;
  const std::int64_t length_q = entry_rows(from, true), length_k = entry_rows(from, false);
  CopiedTensors tensors;
  if (problem.pass == Pass::forward) {
    tensors.add(from.o, to.o, problem.heads_q, from.rows_q(), length_q, problem.dim_v);
    return tensors;
  }
  tensors.add(from.dq, to.dq, problem.heads_q, from.rows_q(), length_q, problem.dim_qk);
  tensors.add(from.dk, to.dk, problem.heads_kv, from.rows_k(), length_k, problem.dim_qk);
  tensors.add(from.dv, to.dv, problem.heads_kv, from.rows_k(), length_k, problem.dim_v);
  return tensors;
}

}  // namespace

AttentionProblem problem_in_f32(const AttentionProblem& problem, Pass pass) {
  AttentionProblem wide = problem;
  wide.pass = pass;
  wide.dtype = DType::f32;
  wide.strict = false;
  wide.aligned = wide.backward.aligned_rows = problem.dim_qk % 4 == 0 && problem.dim_v % 4 == 0;
  return wide;
}

Copies::Copies(const AttentionCall& call, void* space) {
  Arena arena(space);
  const auto rows_in_f32 = [&](bool of_queries, bool wanted, std::int64_t dims) {
    if (!wanted) return Rows{};
    const std::int64_t heads = of_queries ? call.problem.heads_q : call.problem.heads_kv;
    const std::int64_t rows = of_queries ? call.rows_q() : call.rows_k();
    const std::int64_t entry = of_queries ? call.problem.length_q : call.problem.length_k;
    return Rows{.data = reinterpret_cast<std::byte*>(arena.take<float>(heads, rows, dims)),
                .stride_b = call.packed() ? 0 : entry * dims,
                .stride_h = rows * dims,
                .stride_s = dims,
                .wanted = true};
  };
  const std::int64_t dim_qk = call.problem.dim_qk, dim_v = call.problem.dim_v;
  forward = call;
  forward.problem = problem_in_f32(call.problem, Pass::forward);
  forward.q = rows_in_f32(true, true, dim_qk);
  forward.k = rows_in_f32(false, true, dim_qk);
  forward.v = rows_in_f32(false, true, dim_v);
  forward.o = rows_in_f32(true, true, dim_v);
  if (call.problem.pass == Pass::backward) {
    forward.lse = rows_in_f32(true, true, 1);
    backward = forward;
    backward.problem.pass = Pass::backward;
    backward.d_o = rows_in_f32(true, true, dim_v);
    backward.dq = rows_in_f32(true, call.dq.wanted, dim_qk);
    backward.dk = rows_in_f32(false, call.dk.wanted, dim_qk);
    backward.dv = rows_in_f32(false, call.dv.wanted, dim_v);
  }
  bytes = arena.rounded();
}

void widen_inputs(const AttentionCall& call, const Copies& copies, const Context& context) {
  const bool back = call.problem.pass == Pass::backward;
  copy(inputs_of(call, back ? copies.backward : copies.forward), "tilewise widen to f32", context);
}
void round_results(const AttentionCall& call, const Copies& copies, const Context& context) {
  const bool back = call.problem.pass == Pass::backward;
  copy(results_of(back ? copies.backward : copies.forward, call), "tilewise round from f32", context);
}

}  // namespace tilewise::cuda::widened
