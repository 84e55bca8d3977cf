#pragma once

#include <algorithm>

#include "core/matrix.h"
#include "cuda/attention/simt/dense_rows.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::wide {

// Chunks of rows whose S is in memory, and the pass over them.

inline constexpr int warp = 32;
inline constexpr int threads = 256;

/// Bytes that the matrices of a chunk of rows may take.
inline constexpr std::int64_t chunk_bytes = std::int64_t{256} << 20;
/// A chunk's first key is a multiple of this, so that the operands' rows are aligned.
inline constexpr std::int64_t key_step = 64;

constexpr std::int64_t rounded_up(std::int64_t x) { return (x + key_step - 1) / key_step * key_step; }

/// Rows of a chunk. `banded_rows` is the most with causal or a window, where a smaller chunk skips more
/// hidden keys.
inline std::int64_t rows_per_chunk(const AttentionCall& call, std::int64_t bytes_per_pair,
                                   std::int64_t banded_rows, std::int64_t bytes = chunk_bytes) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t row_bytes = rounded_up(problem.length_k) * bytes_per_pair;
  const std::int64_t most = std::max<std::int64_t>(bytes / row_bytes / key_step * key_step, key_step);
  const std::int64_t rows = call.band.bounded() ? std::min(most, banded_rows) : most;
  return std::min(rows, problem.length_q);
}

/// Neighbouring rows of one head, and the keys that any of them sees.
struct Chunk {
  std::int64_t b, h, first, count;
  KeyRange keys;

  std::int64_t width() const { return keys.last - keys.first; }
  __host__ __device__ std::int64_t rows() const { return count; }
  /// Row `own` of these: its query, and its row in the matrices.
  __device__ simt::QueryRow query(const AttentionCall& call, std::int64_t own) const {
    return {call, b, h, first + own};
  }
  __device__ std::int64_t line(std::int64_t own) const { return own; }
  /// The keys of row `own` that have products, and whose P is wanted. It sees no others.
  __device__ KeyRange keys_of(std::int64_t) const { return keys; }
  /// Whether row `own` has key j of these, and whether it sees it as far as a block mask is concerned.
  __device__ bool has(std::int64_t, std::int64_t) const { return true; }
  __device__ bool shows(const AttentionCall&, std::int64_t, std::int64_t) const { return true; }
};

inline Chunk chunk_at(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t first,
                      std::int64_t rows) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t count = std::min(rows, problem.length_q - first);
  const Sequence sequence = call.sequence(b);  // reads no memory: the call has no key lengths
  const KeyRange low = call.keys_of(sequence, first), high = call.keys_of(sequence, first + count - 1);
  const std::int64_t begin = std::clamp<std::int64_t>(low.first, 0, problem.length_k) / key_step * key_step;
  return {b, h, first, count, {begin, std::clamp(high.last, begin, problem.length_k)}};
}

inline Matrix matrix_at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t first,
                        std::int64_t count, std::int64_t dim) {
  return {.data = rows.at(b, h, first),
          .dtype = rows.dtype,
          .rows = count,
          .columns = dim,
          .stride_row = count > 1 ? rows.stride_s : std::max<std::int64_t>(dim, 1)};
}
inline Matrix plain_matrix(void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                           std::int64_t pitch) {
  return {.data = static_cast<std::byte*>(data),
          .dtype = dtype,
          .rows = rows,
          .columns = columns,
          .stride_row = pitch};
}

inline Launch warp_each(const char* name, std::int64_t rows, const Context& context) {
  return {.name = name,
          .blocks = (rows * warp + threads - 1) / threads,
          .threads = threads,
          .stream = static_cast<cudaStream_t>(context.stream)};
}

/// Replaces the products Q·Kᵀ of some rows by P, dropout included, and writes LSE. One warp per row. P may
/// overwrite the products, since each lane reads and writes its own keys only.
template <typename T, typename Some>
__global__ void __launch_bounds__(threads)
    softmax_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ Some rows,
                 float* qk_gmem, T* p_gmem, const std::int64_t pitch) {
  const std::int64_t own = simt::thread_index() / warp;
  if (own >= rows.rows()) return;  // the same for all lanes of a row
  const int lane = threadIdx.x % warp;
  const AttentionFeatures& features = call.problem.features;
  const simt::QueryRow row = rows.query(call, own);
  const ScoreRule rules(call, row.b, row.h);
  const KeyRange keys = rows.keys_of(own);
  float* row_gmem = qk_gmem + rows.line(own) * pitch - rows.keys.first;
  T* out_gmem = p_gmem + rows.line(own) * pitch - rows.keys.first;

  const float sink = features.sinks ? static_cast<float>(call.sinks.at(row.b, row.h)) : minus_infinity;
  // Starts at the lowest finite number, so that no difference is NaN in an empty row.
  float maximum = fmaxf(sink, lowest);
  for (std::int64_t j = keys.first + lane; j < keys.last; j += warp) {
    if (!rows.has(own, j)) continue;
    const bool shown = rows.shows(call, own, j);
    const float score = shown ? simt::pair_score(call, rules, row, j, row_gmem[j]) : minus_infinity;
    row_gmem[j] = score;
    maximum = fmaxf(maximum, score);
  }
  maximum = maximum_over<warp>(maximum);
  double sum = 0;
  for (std::int64_t j = keys.first + lane; j < keys.last; j += warp) {
    if (!rows.has(own, j)) continue;
    const float p = expf(row_gmem[j] - maximum);
    row_gmem[j] = p;
    sum += static_cast<double>(p);
  }
  sum = sum_over<warp>(sum) + static_cast<double>(expf(sink - maximum));
  const bool empty = sum == 0;
  const auto inverse = static_cast<float>(empty ? 0.0 : 1 / sum);
  for (std::int64_t j = keys.first + lane; j < keys.last; j += warp) {
    if (!rows.has(own, j)) continue;
    const bool drawn = features.dropout && row.sees(j);
    const float kept = drawn ? dropout_factor(call, row.b, row.h, row.i, j) : 1.0f;
    out_gmem[j] = narrow<T>(row_gmem[j] * inverse * kept);
  }
  if (lane == 0 && call.lse.wanted) {
    const float lse = empty ? minus_infinity : maximum + logf(static_cast<float>(sum));
    *reinterpret_cast<float*>(call.lse.at(row.b, row.h, row.i)) = lse;
  }
}

}  // namespace tilewise::cuda::wide
