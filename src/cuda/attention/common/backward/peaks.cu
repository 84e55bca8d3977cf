#include "cuda/attention/common/backward/peaks.h"

#include <algorithm>

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/team.cuh"

namespace tilewise::cuda::simt {
namespace {

constexpr int warp = 32;

__device__ __forceinline__ std::int64_t first_warp() {
  return (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / warp;
}
__device__ __forceinline__ std::int64_t all_warps() { return std::int64_t{gridDim.x} * blockDim.x / warp; }

/// How many CTAs have `warps` warps. With `heads`, often none is marked and most CTAs would only start and
/// end, so the grid is at most what is resident at once, and warps loop.
std::int64_t blocks_for(std::int64_t warps, int threads, const AttentionCall& call, const SomeHeads& heads) {
  const std::int64_t all = (warps * warp + threads - 1) / threads;
  if (heads.any == nullptr) return all;
  return std::min<std::int64_t>(all, 2 * device_properties(call.problem.device.index).multiprocessors);
}

// One warp per query.
__device__ void find_state(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                           const SomeHeads& heads, std::int64_t index) {
  const int lane = static_cast<int>(threadIdx.x % warp);
  const std::int64_t length = call.problem.length_q;
  const std::int64_t b = index / length / call.problem.heads_q;
  const std::int64_t h = index / length % call.problem.heads_q;
  const std::int64_t i = index % length;
  const Sequence sequence = call.sequence(b);
  if (i >= sequence.length_q || !heads.has_group(call, b, h / call.group())) return;
  const std::int64_t s = sequence.first_q + i;
  auto* dq = reinterpret_cast<float*>(call.dq.at(b, h, s));
  for (std::int64_t d = lane; d < call.problem.dim_qk; d += warp) dq[d] = 0;
  const auto* o = reinterpret_cast<const float*>(call.o.at(b, h, s));
  const auto* d_o = reinterpret_cast<const float*>(call.d_o.at(b, h, s));
  float sum = 0;
  for (std::int64_t d = lane; d < call.problem.dim_v; d += warp) sum = fmaf(o[d], d_o[d], sum);
  sum = warp_sum(sum);
  if (lane != 0) return;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(b, h, s));
  const float d_lse = call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(b, h, s)) : 0.0f;
  const std::int64_t row = h * call.rows_q() + call.first_row_q(b) + i;
  const bool unseen = lse == -__builtin_huge_valf();
  states.set(row, unseen ? RowState::unseen() : RowState{lse, 1.0f, d_lse - sum});
  peaks.clear(row);
}
__global__ void states_of_outputs(const __grid_constant__ AttentionCall call, const RowStates states,
                                  const Peaks peaks, const SomeHeads heads) {
  let_next_kernel_start();
  wait_for_previous_kernel();  // it may have written O, LSE, dO and dLSE
  if (heads.none()) return;
  const std::int64_t count = call.problem.batch * call.problem.heads_q * call.problem.length_q;
  for (std::int64_t index = first_warp(); index < count; index += all_warps()) {
    find_state(call, states, peaks, heads, index);
  }
}

constexpr int lane_dims = 4;  // of a lane, 32 apart

// The queries of a head are divided into groups, one per warp. A warp takes its queries one after another, so
// small groups end sooner, as long as all warps are resident at once. But queries of one group that add to
// the same key share one atomic addition.
struct RowGroups {
  static constexpr std::int64_t most_rows = 8;
  static constexpr std::int64_t warps = 16;  // per SM, for which there are registers

  int rows;            // queries per group
  std::int64_t count;  // groups per head

  explicit RowGroups(const AttentionCall& call) {
    const AttentionProblem& problem = call.problem;
    const std::int64_t at_once = warps * device_properties(problem.device.index).multiprocessors;
    const std::int64_t all = problem.batch * problem.heads_q * problem.length_q;
    rows = static_cast<int>(std::clamp((all + at_once - 1) / at_once, std::int64_t{1}, most_rows));
    count = (problem.length_q + rows - 1) / rows;
  }
};

// A lane's part of a row of dK or dV. It is summed in registers as long as consecutive peaks have the same
// key, which they often have.
class KeySum {
 public:
  __device__ KeySum(const Rows& rows, std::int64_t dim, std::int64_t b, std::int64_t h,
                    std::int64_t first_key)
      : rows_(rows), dim_(dim), b_(b), h_(h), first_key_(first_key) {}

  __device__ void add(std::int64_t key, float factor, const float (&row)[lane_dims]) {
    if (!rows_.wanted) return;
    if (key != key_) flush();
    key_ = key;
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) sum_[n] = fmaf(factor, row[n], sum_[n]);
  }
  __device__ void flush() {
    if (key_ < 0) return;
    auto* to = reinterpret_cast<float*>(rows_.at(b_, h_, first_key_ + key_));
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      const int d = static_cast<int>(threadIdx.x) % warp + warp * n;
      if (d < dim_) atomicAdd(to + d, sum_[n]);
      sum_[n] = 0;
    }
  }

 private:
  const Rows& rows_;
  std::int64_t dim_, b_, h_, first_key_;
  std::int64_t key_ = -1;
  float sum_[lane_dims] = {};
};

__device__ __forceinline__ void load_row(float (&to)[lane_dims], const Rows& rows, std::int64_t b,
                                         std::int64_t h, std::int64_t s, std::int64_t dim) {
  const auto* row = reinterpret_cast<const float*>(rows.at(b, h, s));
#pragma unroll
  for (int n = 0; n < lane_dims; ++n) {
    const int d = static_cast<int>(threadIdx.x) % warp + warp * n;
    to[n] = d < dim ? row[d] : 0.0f;
  }
}

// What the peaks of a query add to dQ and dK, and what their weights lack for dV.
struct PeakGradients {
  int count = 0;
  std::int64_t key[most_peaks] = {};
  float factor[most_peaks] = {};  // dS times scale
  float lacking[most_peaks] = {};

  __device__ PeakGradients(const AttentionCall& call, const Peaks& peaks, std::int64_t row, float d_lse)
      : count(min(peaks.count[row], most_peaks)) {
    if (count == 0) return;
    const float rest = peaks.rest_weight[row];
    float total = rest;
    float weight[most_peaks] = {}, gradient[most_peaks] = {};
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      if (f >= count) continue;
      const Peak peak = peaks.first[row * most_peaks + f];
      key[f] = peak.key;
      weight[f] = peak.weight;
      gradient[f] = peak.gradient;
      total += peak.weight;
    }
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      float sum = fmaf(rest, gradient[f], -peaks.rest_gradient[row]);
#pragma unroll
      for (int g = 0; g < most_peaks; ++g) sum = fmaf(weight[g], gradient[f] - gradient[g], sum);
      factor[f] = static_cast<float>(call.scale) * (weight[f] / total) * (sum / total + d_lse);
      lacking[f] = weight[f] * (1 - total) / total;
    }
  }
  PeakGradients() = default;
};

// A warp takes the queries of a group: first each lane computes the factors of one query, then all lanes add
// the vectors of one query after another.
__device__ void mend_group(const AttentionCall& call, const Peaks& peaks, const SomeHeads& heads,
                           std::int64_t index, const RowGroups& groups) {
  const std::int64_t head = index / groups.count;
  const std::int64_t b = head / call.problem.heads_q;
  const std::int64_t h = head % call.problem.heads_q;
  if (!heads.has_group(call, b, h / call.group())) return;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const Sequence sequence = call.sequence(b);
  const std::int64_t dim = call.problem.dim_qk, dim_v = call.problem.dim_v;
  const std::int64_t first = index % groups.count * groups.rows;
  PeakGradients own;
  if (lane < groups.rows && first + lane < sequence.length_q) {
    const std::int64_t s = sequence.first_q + first + lane;
    own = PeakGradients(call, peaks, h * call.rows_q() + call.first_row_q(b) + first + lane,
                        call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(b, h, s)) : 0.0f);
  }
  KeySum dk(call.dk, dim, b, call.key_head(h), sequence.first_k);
  KeySum dv(call.dv, dim_v, b, call.key_head(h), sequence.first_k);
  for (unsigned left = __ballot_sync(~0u, own.count > 0); left != 0; left &= left - 1) {
    const int from = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t s = sequence.first_q + first + from;
    float q[lane_dims], d_o[lane_dims], dq[lane_dims], k[most_peaks][lane_dims], factor[most_peaks];
    const int count = __shfl_sync(~0u, own.count, from);
    load_row(q, call.q, b, h, s, dim);
    load_row(d_o, call.d_o, b, h, s, dim_v);
    load_row(dq, call.dq, b, h, s, dim);
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      const std::int64_t key = __shfl_sync(~0u, own.key[f], from);
      factor[f] = __shfl_sync(~0u, own.factor[f], from);
      if (f < count) load_row(k[f], call.k, b, call.key_head(h), sequence.first_k + key, dim);
    }
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      const std::int64_t key = __shfl_sync(~0u, own.key[f], from);
      const float lacking = __shfl_sync(~0u, own.lacking[f], from);
      if (f >= count) continue;
#pragma unroll
      for (int n = 0; n < lane_dims; ++n) dq[n] = fmaf(factor[f], k[f][n], dq[n]);
      dk.add(key, factor[f], q);
      dv.add(key, lacking, d_o);
    }
    auto* to = reinterpret_cast<float*>(call.dq.at(b, h, s));
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      if (lane + warp * n < dim) to[lane + warp * n] = dq[n];
    }
  }
  dk.flush();
  dv.flush();
}
__global__ void mend(const __grid_constant__ AttentionCall call, const Peaks peaks, const SomeHeads heads,
                     const RowGroups groups) {
  let_next_kernel_start();
  wait_for_previous_kernel();  // it wrote the gradients and the peaks
  if (heads.none()) return;
  const std::int64_t count = call.problem.batch * call.problem.heads_q * groups.count;
  for (std::int64_t index = first_warp(); index < count; index += all_warps()) {
    mend_group(call, peaks, heads, index, groups);
  }
}

}  // namespace

void row_states_of_outputs(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                           const SomeHeads& heads, cudaStream_t stream) {
  constexpr int threads = 256;
  const std::int64_t rows = call.problem.batch * call.problem.heads_q * call.problem.length_q;
  launch<states_of_outputs>({.name = "tilewise row states",
                             .blocks = blocks_for(rows, threads, call, heads),
                             .threads = threads,
                             .stream = stream,
                             .early = has_pdl(call.problem.device)},
                            call, states, peaks, heads);
}

void mend_peaks(const AttentionCall& call, const Peaks& peaks, const SomeHeads& heads, cudaStream_t stream) {
  constexpr int threads = 128;
  const RowGroups groups(call);
  const std::int64_t warps = call.problem.batch * call.problem.heads_q * groups.count;
  launch<mend>({.name = "tilewise fused backward, peaks",
                .blocks = blocks_for(warps, threads, call, heads),
                .threads = threads,
                .stream = stream,
                .early = has_pdl(call.problem.device)},
               call, peaks, heads, groups);
}

}  // namespace tilewise::cuda::simt
