#include "cuda/mma_f32/row_values.h"

#include "cuda/mma_f32/split.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

constexpr int threads = 256;

/// What is known of every query, a warp each; makes dq 0.
__global__ void __launch_bounds__(threads) find_row_values(const __grid_constant__ AttentionCall call,
                                                           const RowValues rows, const simt::Peaks peaks) {
  const std::int64_t index = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t length = call.problem.length_q;
  if (index >= call.problem.batch * call.problem.heads_q * length) return;
  const std::int64_t b = index / length / call.problem.heads_q;
  const std::int64_t h = index / length % call.problem.heads_q;
  const std::int64_t i = index % length;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q) return;
  const std::int64_t s = sequence.first_q + i;
  auto* dq = reinterpret_cast<float*>(call.dq.at(b, h, s));
  for (std::int64_t d = lane; d < call.problem.dim_qk; d += 32) dq[d] = 0;
  const auto* o = reinterpret_cast<const float*>(call.o.at(b, h, s));
  const auto* d_o = reinterpret_cast<const float*>(call.d_o.at(b, h, s));
  float sum = 0;
  for (std::int64_t d = lane; d < call.problem.dim_v; d += 32) sum = fmaf(o[d], d_o[d], sum);
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(b, h, s));
  const float d_lse = call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(b, h, s)) : 0.0f;
  const std::int64_t row = h * call.rows_q() + call.first_row_q(b) + i;
  const bool unseen = lse == minus_infinity;
  // Exponents lose digits the farther they are from 0. Weights of a row lie around 1 over the number of keys;
  // half the logarithm of that leaves some to the highest ones.
  const KeyRange keys = call.keys_of(sequence, i);
  const int middle =
      unseen ? 0 : (31 - __clz(static_cast<int>(max(keys.last - keys.first, std::int64_t{1})))) / 2;
  const double exact = static_cast<double>(lse) * 1.4426950408889634 - middle;
  const auto top = static_cast<float>(exact);
  const auto rest = static_cast<float>(exact - static_cast<double>(top));
  rows.top[row] = unseen ? -minus_infinity : top;
  rows.factor[row] = unseen ? 0.0f : exp2f(-rest) * power_of_two(weight_bits - middle);
  rows.shift[row] = unseen ? 0.0f : d_lse - sum;
  peaks.clear(row);
}

/// Eight rows a block.
__global__ void __launch_bounds__(threads) clear_keys(const __grid_constant__ AttentionCall call) {
  const std::int64_t index = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const std::int64_t lane = threadIdx.x % 32;
  const std::int64_t length = call.problem.length_k;
  if (index >= call.problem.batch * call.problem.heads_kv * length) return;
  const std::int64_t b = index / length / call.problem.heads_kv;
  const std::int64_t h = index / length % call.problem.heads_kv;
  const Sequence sequence = call.sequence(b);
  if (index % length >= sequence.length_k) return;
  const auto clear = [&](const Rows& rows, std::int64_t dims) {
    if (!rows.wanted) return;
    auto* row = reinterpret_cast<float*>(rows.at(b, h, sequence.first_k + index % length));
    for (std::int64_t d = lane; d < dims; d += 32) row[d] = 0;
  };
  clear(call.dk, call.problem.dim_qk);
  clear(call.dv, call.problem.dim_v);
}

/// A weight that is all but 1 is off by as much as lse was rounded, and so is what it adds to dv. The sum of
/// all weights of its row says by how much. A lane has a query, and all lanes its d_o if it has peaks.
__global__ void __launch_bounds__(threads)
    mend_rows(const __grid_constant__ AttentionCall call, const simt::Peaks peaks) {
  const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t length = call.problem.length_q;
  const std::int64_t count = call.problem.batch * call.problem.heads_q * length;
  const auto place = [&](std::int64_t at, std::int64_t& b, std::int64_t& h, std::int64_t& i) {
    b = at / length / call.problem.heads_q;
    h = at / length % call.problem.heads_q;
    i = at % length;
    return h * call.rows_q() + call.first_row_q(b) + i;
  };
  std::int64_t b, h, i;
  bool own = false;
  if (index < count) {
    const std::int64_t row = place(index, b, h, i);
    own = i < call.sequence(b).length_q && peaks.count[row] > 0;
  }
  for (unsigned left = __ballot_sync(~0u, own); left != 0; left &= left - 1) {
    const std::int64_t row = place(index - lane + __ffs(static_cast<int>(left)) - 1, b, h, i);
    const int some = min(peaks.count[row], simt::most_peaks);
    float total = peaks.rest_weight[row];
    for (int n = 0; n < some; ++n) total += peaks.first[row * simt::most_peaks + n].weight;
    const Sequence sequence = call.sequence(b);
    const auto* d_o = reinterpret_cast<const float*>(call.d_o.at(b, h, sequence.first_q + i));
    for (int n = 0; n < some; ++n) {
      const simt::Peak peak = peaks.first[row * simt::most_peaks + n];
      const float factor = peak.weight * (1 - total) / total;
      auto* dv = reinterpret_cast<float*>(call.dv.at(b, h / call.group(), sequence.first_k + peak.key));
      for (std::int64_t d = lane; d < call.problem.dim_v; d += 32) atomicAdd(dv + d, factor * d_o[d]);
    }
  }
}

std::int64_t queries_of(const AttentionCall& call) {
  return call.problem.batch * call.problem.heads_q * call.problem.length_q;
}

}  // namespace

void row_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  launch<find_row_values>({.name = "tilewise mma backward, rows",
                           .blocks = (queries_of(call) * 32 + threads - 1) / threads,
                           .threads = threads,
                           .stream = stream},
                          call, space.rows, space.peaks);
}

void clear_key_gradients(const AttentionCall& call, cudaStream_t stream) {
  const std::int64_t rows = call.problem.batch * call.problem.heads_kv * call.problem.length_k;
  launch<clear_keys>({.name = "tilewise mma backward, clearing",
                      .blocks = (rows * 32 + threads - 1) / threads,
                      .threads = threads,
                      .stream = stream},
                     call);
}

void mend_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  if (!call.dv.wanted) return;
  launch<mend_rows>({.name = "tilewise mma backward, dv",
                     .blocks = (queries_of(call) + threads - 1) / threads,
                     .threads = threads,
                     .stream = stream},
                    call, space.peaks);
}

}  // namespace tilewise::cuda::mma_f32
