#include "cuda/attention/simt/forward/fused_short.h"

#include <algorithm>

#include "cuda/attention/simt/forward/few_keys_softmax.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

using namespace few_keys;

// Attention over so few keys that a CTA holds S of all of them at once in registers. A lane has 8 x 8
// elements in both products, where forward/fused.cu, which keeps O beside S, has room for 8 x 4 of S. Both
// operands of both products are transposed, for which the compiler generates the best code. Such problems
// have a single wave of CTAs, so everything beside the products counts: addresses need few numbers
// (ShortCall), Q and K are loaded in pieces of D, V is copied during the first product, and all warps write
// O.
//
// How the 8 warps share the work:
//
//   S = Q·Kᵀ   2 halves of the queries x 4 quarters of the keys
//   O = P·V    2 halves of the queries x 2 halves of the dims x 2 groups, each with half of the keys

// The epilogue: adds the two groups' O. Each group writes half of a lane's queries, and gets the other
// group's sums of these through shared memory.
__device__ __forceinline__ void join_and_write(const ShortCall& call, const Work& work, const Place& place,
                                               const float (&o)[M][N], float* shared) {
  const bool second = place.group == 1;
  float4* exchange = reinterpret_cast<float4*>(shared + exchange_at) +
                     threadIdx.x % (threads / 2);  // [group, M, threads / 2]
  __syncthreads();                                 // all warps have read P, which the exchange overwrites
#pragma unroll
  for (int m = 0; m < M / 2; ++m) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const float* first = o[m] + 4 * run;
      const float* last = o[m + M / 2] + 4 * run;
      exchange[((second ? 0 : M) + 2 * m + run) * (threads / 2)] =
          second ? float4{first[0], first[1], first[2], first[3]}
                 : float4{last[0], last[1], last[2], last[3]};
    }
  }
  __syncthreads();  // the other group's half is stored
  float* o_gmem = call.o.first(work.b, work.h, work.first_query);
#pragma unroll
  for (int m = 0; m < M / 2; ++m) {
    const int r = place.query(second ? m + M / 2 : m);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const float4 other = exchange[((second ? M : 0) + 2 * m + run) * (threads / 2)];
      float own[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) own[d] = second ? o[m + M / 2][4 * run + d] : o[m][4 * run + d];
      const int d = place.dim_of(4 * run);
      if (r < work.query_count && d < call.dim_v) {
        store_4(call.o.at(o_gmem, r) + d,
                float4{own[0] + other.x, own[1] + other.y, own[2] + other.z, own[3] + other.w});
      }
    }
  }
}

__device__ __forceinline__ void attend(const ShortCall& call, float* shared) {
  const Work work(call);
  const Place place;
  const ValueCopies values(call, work, shared);
  float s[M][N] = {};
  multiply_keys(call, work, place, values, s, shared);
  if (call.negative) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) s[m][n] = -s[m][n];
    }
  }
  hide(call, work, place, s);
  softmax(call, place, s, shared);
  values.finish();
  __syncthreads();  // P is stored, and all threads' copies of V have arrived

  float o[M][N] = {};
  const int first_key = place.group * group_keys;
  multiply_transposed(o, P{shared + p_at + P::offset(first_key) + place.query(0)},
                      Values{shared + v_at + first_key * dim + place.dim_of(0)},
                      min(group_keys, (work.key_count - first_key + 7) / 8 * 8));
  const float own_inverse = join_quarters(call, work, place, shared);
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float inverse = __shfl_sync(~0u, own_inverse, in_runs<4>(place.lane.row, m));
#pragma unroll
    for (int n = 0; n < N; ++n) o[m][n] *= inverse;
  }
  join_and_write(call, work, place, o, shared);
}

__global__ void __launch_bounds__(threads, 1) fused_short(const __grid_constant__ ShortCall call) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  if constexpr (runs_in_code(shared_bytes)) attend(call, shared);
}

}  // namespace

bool takes_short(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const DeviceProperties& device = device_properties(context.device.index);
  const std::int64_t blocks = problem.batch * problem.heads_q * ((problem.length_q + queries - 1) / queries);
  return problem.layout == Layout::dense && call.key_lengths.data == nullptr && !problem.features.sinks &&
         !problem.piece.off_diagonal && problem.length_k > most_keys / 2 && problem.length_k <= most_keys &&
         problem.dim_qk > dim / 2 && problem.dim_qk <= dim && problem.dim_qk % piece == 0 &&
         problem.dim_v <= dim && ShortRows::holds(call.q) && ShortRows::holds(call.k) &&
         ShortRows::holds(call.v) && ShortRows::holds(call.o) && ShortRows::holds(call.lse) &&
         blocks <= device.multiprocessors && shared_bytes <= device.shared_bytes;
}

void short_forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t offset = call.sequence(0).band_offset;
  const auto bound = [](std::int64_t distance) {
    return static_cast<int>(std::clamp<std::int64_t>(distance, -(1 << 30), 1 << 29));
  };
  const float sign = call.scale < 0 ? -1.0f : 1.0f;
  const ShortCall how{.q = ShortRows::of(call.q),
                      .k = ShortRows::of(call.k),
                      .v = ShortRows::of(call.v),
                      .o = ShortRows::of(call.o),
                      .lse = ShortRows::of(call.lse),
                      .heads = Divisor::of(problem.heads_q),
                      .gqa_group = Divisor::of(call.group()),
                      .length_q = static_cast<int>(problem.length_q),
                      .length_k = static_cast<int>(problem.length_k),
                      .dim_qk = static_cast<int>(problem.dim_qk),
                      .dim_v = static_cast<int>(problem.dim_v),
                      .left = bound(call.band.left - offset),
                      .right = bound(call.band.right + offset),
                      .scale = static_cast<float>(call.scale) * sign,
                      .unit = static_cast<float>(call.scale * 1.4426950408889634) * sign,
                      .negative = sign < 0};
  launch<fused_short>({.name = "tilewise fused forward, few keys",
                       .blocks = (problem.length_q + queries - 1) / queries,
                       .threads = threads,
                       .layers = static_cast<int>(problem.batch * problem.heads_q),
                       .shared_bytes = shared_bytes,
                       .stream = static_cast<cudaStream_t>(context.stream)},
                      how);
}

}  // namespace tilewise::cuda::simt
