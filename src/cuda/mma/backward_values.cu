#include "cuda/mma/backward.h"
#include "cuda/mma/backward_batch_rows.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/key_grid.cuh"

namespace tilewise::cuda::mma {
namespace {

// Where dv has few elements: what rounding took from the weights in it. Each weight is made once more as the
// kernel over tiles made it, but for the order of sums, and what its rounding takes is multiplied in f32.

/// Which sequence a key is of.
__device__ std::int64_t sequence_of_key(const AttentionCall& call, const BatchRow& row) {
  if (!call.packed()) return row.b;
  std::int64_t b = 0;
  while (call.cumulative_k.at(b + 1) <= row.s) ++b;
  return b;
}

/// What rounding takes from the weight of query i of sequence b, row `row` of the batch, and key j.
template <typename T>
__device__ float lost_weight(const AttentionCall& call, const BackwardSpace& space, const Sequence& sequence,
                             std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j,
                             std::int64_t row) {
  KeyTile keys{j, 1};
  if (!meets(call, {.b = b, .h = h, .first = i, .count = 1, .sequence = sequence}, keys) ||
      hidden(call, sequence, keys, i, j)) {
    return 0;
  }
  const AttentionFeatures& features = call.problem.features;
  if (features.dropout &&
      !call.dropout.drawn().keeps(static_cast<std::uint32_t>(b * call.problem.heads_q + h),
                                  static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j))) {
    return 0;
  }
  const BatchRow query = BatchRow::of_query(call, row);
  const std::byte* q_row = row_of_halves(call.q, query.b, h, query.s);
  const std::byte* k_row = row_of_halves(call.k, query.b, call.key_head(h), sequence.first_k + j);
  const auto dims = static_cast<int>(call.problem.dim_qk);
  float product = 0;
  for (int d = 0; d < dims; d += 8) {
    float q[8], k[8];
    load_eight<T>(q, q_row, d, dims, aligned_chunks(call.q));
    load_eight<T>(k, k_row, d, dims, aligned_chunks(call.k));
#pragma unroll
    for (int n = 0; n < 8; ++n) product = fmaf(q[n], k[n], product);
  }
  const float top = space.rows.top[row];
  float weight;
  if (space.rows.offset != nullptr) {
    float tangent;
    const float score = score_of(call, ScoreRules(call, b, h), sequence, b, h, i, j, product, tangent);
    weight = exp2_approx(fmaf(score - top, log2e, space.rows.offset[row] + weight_bits<T>));
  } else {
    weight =
        exp2_approx(fmaf(product, static_cast<float>(call.scale * 1.4426950408889634), weight_bits<T> - top));
  }
  if (!(weight <= space.rows.limits.least * static_cast<float>(1 << weight_bits<T>)))
    return 0;  // a peak is whole
  return weight - widen(narrow<T>(weight));
}

/// A warp has a key. A lane has a query's weight at a time, then all have the dims of one after another.
template <typename T>
__global__ void __launch_bounds__(row_threads)
    mend_values(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  constexpr int lane_dims = 8;
  const RowLanes<32> at;
  const BatchRow key = BatchRow::of_key(call, at.row);
  if (!key.owned) return;
  const std::int64_t b = sequence_of_key(call, key);
  const Sequence sequence = call.sequence(b);
  const std::int64_t j = call.packed() ? key.s - sequence.first_k : key.s;
  const std::int64_t position = j - sequence.band_offset;
  const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
  const std::int64_t end_query = min(sequence.length_q, position + 1 + call.band.left);
  const auto dims = static_cast<int>(call.problem.dim_v);
  float sum[lane_dims] = {};
  for (std::int64_t h = key.h * call.group(); h < (key.h + 1) * call.group(); ++h) {
    const std::int64_t first_row = h * call.rows_q() + call.first_row_q(b);
    for (std::int64_t i = first_query; i < end_query; i += 32) {
      const std::int64_t own = i + at.lane;
      const float lost =
          own < end_query ? lost_weight<T>(call, space, sequence, b, h, own, j, first_row + own) : 0.0f;
      __syncwarp();  // masks may have parted the lanes
      for (int from = 0; from < 32; ++from) {
        const float factor = __shfl_sync(~0u, lost, from);
        if (factor == 0) continue;
        const BatchRow query = BatchRow::of_query(call, first_row + i + from);
        const auto* d_o = reinterpret_cast<const T*>(row_of_halves(call.d_o, query.b, h, query.s));
#pragma unroll
        for (int n = 0; n < lane_dims; ++n) {
          const int d = at.lane + 32 * n;
          if (d < dims) sum[n] = fmaf(factor, widen(d_o[d]), sum[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < lane_dims; ++n) {
    const int d = at.lane + 32 * n;
    if (d < dims) space.dv[at.row * dims + d] += sum[n];
  }
}

}  // namespace

void mend_few_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  if (!space.whole_values) return;
  with_lanes(call, [&]<typename T, int lanes>() {
    launch<mend_values<T>>({.name = "tilewise mma backward, few values",
                            .blocks = RowLanes<32>::blocks(space.shares.keys),
                            .threads = row_threads,
                            .stream = stream},
                           call, space);
  });
}

}  // namespace tilewise::cuda::mma
