#include "cuda/mma_f32/row_values.h"

#include "cuda/mma_f32/split.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

constexpr int threads = 256;
constexpr int rows_each = 4;  // of a warp: so many loads are under way

/// Consecutive rows of a head and sequence, `rows_each` at most, which a warp has.
struct SomeRows {
  std::int64_t b, h, first;
  Sequence sequence;
  int count = 0;

  __device__ SomeRows(const AttentionCall& call, bool queries) {
    const std::int64_t heads = queries ? call.problem.heads_q : call.problem.heads_kv;
    const std::int64_t parts = parts_of(queries ? call.problem.length_q : call.problem.length_k);
    const std::int64_t index = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
    b = index / parts / heads;
    h = index / parts % heads;
    first = index % parts * rows_each;
    if (b >= call.problem.batch) return;
    sequence = call.sequence(b);
    const std::int64_t left = (queries ? sequence.length_q : sequence.length_k) - first;
    count = static_cast<int>(max(std::int64_t{0}, min(left, std::int64_t{rows_each})));
  }
  static constexpr std::int64_t parts_of(std::int64_t length) { return (length + rows_each - 1) / rows_each; }
};

/// A lane's four of a row's numbers; head dims are multiples of 4 up to 128, and rows are aligned.
__device__ __forceinline__ float4* four_of(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t s) {
  return reinterpret_cast<float4*>(rows.at(b, h, s)) + threadIdx.x % 32;
}

// The first two run beside the kernel that splits, and wait for it in the end alone, since the next waits for
// them.

/// What is known of queries; makes dq 0.
__device__ void find_row_value(const AttentionCall& call, const RowValues& rows, const simt::Peaks& peaks) {
  const SomeRows own(call, true);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool of_qk = 4 * lane < call.problem.dim_qk, of_v = 4 * lane < call.problem.dim_v;
  const std::int64_t first = own.sequence.first_q + own.first;
  float4 o[rows_each], d_o[rows_each];
#pragma unroll
  for (int n = 0; n < rows_each; ++n) {
    o[n] = d_o[n] = {};
    if (n >= own.count) continue;
    if (of_v) o[n] = *four_of(call.o, own.b, own.h, first + n);
    if (of_v) d_o[n] = *four_of(call.d_o, own.b, own.h, first + n);
    if (of_qk) *four_of(call.dq, own.b, own.h, first + n) = {};
  }
  float own_sum = 0;  // of the row that the lane goes on with
#pragma unroll
  for (int n = 0; n < rows_each; ++n) {
    float sum = fmaf(o[n].x, d_o[n].x, o[n].y * d_o[n].y) + fmaf(o[n].z, d_o[n].z, o[n].w * d_o[n].w);
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane == n) own_sum = sum;
  }
  if (lane >= own.count) return;
  const std::int64_t i = own.first + lane, s = first + lane;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(own.b, own.h, s));
  const float d_lse =
      call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(own.b, own.h, s)) : 0.0f;
  const std::int64_t row = own.h * call.rows_q() + call.first_row_q(own.b) + i;
  const bool unseen = lse == minus_infinity;
  // Exponents lose digits the farther they are from 0. Weights of a row lie around 1 over the number of keys;
  // half the logarithm of that leaves some to the highest ones.
  const KeyRange keys = call.keys_of(own.sequence, i);
  const int middle =
      unseen ? 0 : (31 - __clz(static_cast<int>(max(keys.last - keys.first, std::int64_t{1})))) / 2;
  const double exact = static_cast<double>(lse) * 1.4426950408889634 - middle;
  const auto top = static_cast<float>(exact);
  const auto rest = static_cast<float>(exact - static_cast<double>(top));
  rows.top[row] = unseen ? -minus_infinity : top;
  rows.factor[row] = unseen ? 0.0f : exp2f(-rest) * power_of_two(weight_bits - middle);
  rows.shift[row] = unseen ? 0.0f : d_lse - own_sum;
  peaks.clear(row);
}
__global__ void __launch_bounds__(threads) find_row_values(const __grid_constant__ AttentionCall call,
                                                           const RowValues rows, const simt::Peaks peaks) {
  let_kernel_behind_begin();
  find_row_value(call, rows, peaks);
  wait_for_kernel_ahead();
}

__global__ void __launch_bounds__(threads) clear_keys(const __grid_constant__ AttentionCall call) {
  let_kernel_behind_begin();
  const SomeRows own(call, false);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (int n = 0; n < own.count; ++n) {
    const std::int64_t s = own.sequence.first_k + own.first + n;
    if (call.dk.wanted && 4 * lane < call.problem.dim_qk) *four_of(call.dk, own.b, own.h, s) = {};
    if (call.dv.wanted && 4 * lane < call.problem.dim_v) *four_of(call.dv, own.b, own.h, s) = {};
  }
  wait_for_kernel_ahead();
}

/// A weight that is all but 1 is off by as much as lse was rounded, and so is what it adds to dv. The sum of
/// all weights of its row says by how much. A warp has few queries: the first ones of a causal head all have
/// peaks.
__global__ void __launch_bounds__(threads)
    mend_rows(const __grid_constant__ AttentionCall call, const simt::Peaks peaks) {
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const SomeRows own(call, true);
  if (own.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first_row = own.h * call.rows_q() + call.first_row_q(own.b) + own.first;
  const int own_peaks = lane < own.count ? min(peaks.count[first_row + lane], simt::most_peaks) : 0;
  for (unsigned left = __ballot_sync(~0u, own_peaks > 0); left != 0; left &= left - 1) {
    const int n = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t row = first_row + n;
    const int some = __shfl_sync(~0u, own_peaks, n);
    float total = peaks.rest_weight[row];
    for (int m = 0; m < some; ++m) total += peaks.first[row * simt::most_peaks + m].weight;
    const auto* d_o =
        reinterpret_cast<const float*>(call.d_o.at(own.b, own.h, own.sequence.first_q + own.first + n));
    for (int m = 0; m < some; ++m) {
      const simt::Peak peak = peaks.first[row * simt::most_peaks + m];
      const float factor = peak.weight * (1 - total) / total;
      auto* dv =
          reinterpret_cast<float*>(call.dv.at(own.b, own.h / call.group(), own.sequence.first_k + peak.key));
      for (std::int64_t d = lane; d < call.problem.dim_v; d += 32) atomicAdd(dv + d, factor * d_o[d]);
    }
  }
}

/// A warp for so many rows each of so many heads.
Launch warps_for(const char* name, const AttentionCall& call, std::int64_t heads, std::int64_t length,
                 cudaStream_t stream) {
  const std::int64_t warps = call.problem.batch * heads * SomeRows::parts_of(length);
  return {.name = name,
          .blocks = (warps * 32 + threads - 1) / threads,
          .threads = threads,
          .stream = stream,
          .early = begins_early(call.problem.device)};
}

}  // namespace

void row_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  launch<find_row_values>(
      warps_for("tilewise mma backward, rows", call, call.problem.heads_q, call.problem.length_q, stream),
      call, space.rows, space.peaks);
}

void clear_key_gradients(const AttentionCall& call, cudaStream_t stream) {
  launch<clear_keys>(warps_for("tilewise mma backward, clearing", call, call.problem.heads_kv,
                               call.problem.length_k, stream),
                     call);
}

void mend_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  if (!call.dv.wanted) return;
  launch<mend_rows>(
      warps_for("tilewise mma backward, dv", call, call.problem.heads_q, call.problem.length_q, stream), call,
      space.peaks);
}

}  // namespace tilewise::cuda::mma_f32
