#include "cuda/mma_f32/mend_values.h"

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma_f32 {
namespace {

constexpr int threads = 256;
constexpr int rows_each = 4;  // of a warp

/// Consecutive queries of a head and sequence, `rows_each` at most, which a warp has.
struct SomeRows {
  std::int64_t b, h, first;
  Sequence sequence;
  int count = 0;

  __device__ explicit SomeRows(const AttentionCall& call) {
    const std::int64_t heads = call.problem.heads_q;
    const std::int64_t parts = parts_of(call.problem.length_q);
    const std::int64_t index = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
    b = index / parts / heads;
    h = index / parts % heads;
    first = index % parts * rows_each;
    if (b >= call.problem.batch) return;
    sequence = call.sequence(b);
    count = static_cast<int>(max(std::int64_t{0}, min(sequence.length_q - first, std::int64_t{rows_each})));
  }
  static constexpr std::int64_t parts_of(std::int64_t length) { return (length + rows_each - 1) / rows_each; }
};

/// A weight that is all but 1 is off by as much as lse was rounded, and so is what it adds to dv. The sum of
/// all weights of its row says by how much. A warp has few queries: the first ones of a causal head all have
/// peaks.
__global__ void __launch_bounds__(threads)
    mend_rows(const __grid_constant__ AttentionCall call, const simt::Peaks peaks) {
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const SomeRows own(call);
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

}  // namespace

void mend_values(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  if (!call.dv.wanted) return;
  const std::int64_t warps =
      call.problem.batch * call.problem.heads_q * SomeRows::parts_of(call.problem.length_q);
  launch<mend_rows>({.name = "tilewise mma backward, dv",
                     .blocks = (warps * 32 + threads - 1) / threads,
                     .threads = threads,
                     .stream = stream,
                     .early = begins_early(call.problem.device)},
                    call, space.peaks);
}

}  // namespace tilewise::cuda::mma_f32
