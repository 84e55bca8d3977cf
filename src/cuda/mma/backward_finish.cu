#include "cuda/mma/backward.h"
#include "cuda/mma/backward_batch_rows.cuh"
#include "cuda/mma/backward_choice.h"
#include "cuda/mma/backward_ordered_keys.cuh"
#include "cuda/mma/backward_peaks.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/row_gradients.h"

namespace tilewise::cuda::mma {
namespace {

// What is left after the kernel over tiles: dq from its sums, peaks, and gradients beside dq, dk and dv.

// The gradients of peaks; and where they are, for what is to be added in one order.
template <typename T>
__global__ void __launch_bounds__(row_threads)
    settle_peaks(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  const std::int64_t index = std::int64_t{blockIdx.x} * row_threads + threadIdx.x;
  const BatchRow row = BatchRow::of_query(call, index);
  const RowPeaks peaks(space.rows, index, row.owned);
  int first_k = 0;
  if (peaks.count > 0) {
    if (call.deterministic) peaks.sort();
    const auto [b, i] = row.in_sequence(call);
    const Sequence sequence = call.sequence(b);
    const KeyRange seen = call.keys_of(sequence, i);
    first_k = static_cast<int>(sequence.first_k);
    peaks.settle(d_lse_of(call, row), gradient_scale<T>(call, space), first_k, seen.last - seen.first);
  }
  if (space.places.keys == nullptr) return;
  __syncwarp();  // some lanes had no peak
  note_parts(space.places, peaks, first_k);
  list_keys(call, space);
}

// dq from its sums, with what a peak adds.
template <typename T, int lanes>
__global__ void __launch_bounds__(row_threads)
    finish_queries(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  const RowLanes<lanes> at;
  const BatchRow row = BatchRow::of_query(call, at.row);
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const int first = at.lane * 8;
  if (!row.owned || first >= dims) return;
  const auto [b, i] = row.in_sequence(call);
  const QuerySums::Place place = QuerySums::place(call, i);
  const float* fragment = space.dq.at(row.h, QuerySums::first_tile(call, b) + place.tile, at.lane);
  float sum[8];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two =
        *reinterpret_cast<const float2*>(fragment + (place.row % 8 * 4 + n) * 4 + place.row / 8 * 2);
    sum[2 * n] = two.x;
    sum[2 * n + 1] = two.y;
  }
  const GradientScale scale = gradient_scale<T>(call, space);
  const RowPeaks peaks(space.rows, at.row, true);
  for (int f = 0; f < peaks.count; ++f) {
    const Peak peak = peaks.at(f);
    float k[8];
    load_eight<T>(k, row_of_halves(call.k, row.b, call.key_head(row.h), peak.key), first, dims,
                  aligned_chunks(call.k));
#pragma unroll
    for (int n = 0; n < 8; ++n) sum[n] = fmaf(peak.x, k[n], sum[n]);
  }
  const float factor = static_cast<float>(call.scale) * scale.down;
  const uint4 eight{pack<T>(sum[0] * factor, sum[1] * factor), pack<T>(sum[2] * factor, sum[3] * factor),
                    pack<T>(sum[4] * factor, sum[5] * factor), pack<T>(sum[6] * factor, sum[7] * factor)};
  store_eight(row_of_halves(call.dq, row.b, row.h, row.s), first, dims, aligned_chunks(call.dq), eight);
}

// What the sums of dk and dv are multiplied by.
struct KeyFactors {
  float dk, dv;
};
template <typename T>
__device__ KeyFactors key_factors(const AttentionCall& call, const BackwardSpace& space) {
  const float keep_scale = call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  return {static_cast<float>(call.scale) * gradient_scale<T>(call, space).down,
          keep_scale / static_cast<float>(1 << weight_bits<T>)};
}

// What peaks add to a key, which grows as long as queries point at the same one, as they often do.
struct KeySum {
  const BackwardSpace& space;
  std::int64_t key = -1;  // which of [Hkv, rows_k]
  LaneVector<8> dk, dv;

  __device__ KeySum(const AttentionCall& call, const BackwardSpace& space_)
      : space(space_),
        dk{.dims = static_cast<int>(call.problem.dim_qk)},
        dv{.dims = static_cast<int>(call.problem.dim_v)} {}

  __device__ void turn_to(std::int64_t next) {
    if (next == key) return;
    flush();
    key = next;
  }
  __device__ void flush() {
    if (key < 0) return;
    if (space.dk != nullptr) move(dk, space.dk + key * dk.dims);
    if (space.dv != nullptr) move(dv, space.dv + key * dv.dims);
  }

 private:
  __device__ static void move(LaneVector<8>& from, float* to) {
    from.each([&](int d, float& x) {
      atomicAdd(to + d, x);
      x = 0;
    });
  }
};

// Adds what peaks add. The warp has queries from `first_row` on: a lane each for the numbers, then all lanes
// for the vectors of one after another.
template <typename T>
__device__ __forceinline__ void add_peaks(const AttentionCall& call, const BackwardSpace& space,
                                          std::int64_t first_row, const RowPeaks& peaks, KeySum& sum) {
  for (int f = 0; __any_sync(~0u, f < peaks.count); ++f) {
    Peak peak{};
    if (f < peaks.count) peak = peaks.at(f);
    unsigned left = __ballot_sync(~0u, f < peaks.count);
    for (; left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      const BatchRow row = BatchRow::of_query(call, first_row + from);
      const int key = __shfl_sync(~0u, peak.key, from);
      const float gradient = __shfl_sync(~0u, peak.x, from);
      const float weight = fmaxf(0.0f, __shfl_sync(~0u, peak.weight, from));
      sum.turn_to(space.key_row(call, row.b, call.key_head(row.h), key));
      sum.dk.add<T>(gradient, row_of_halves(call.q, row.b, row.h, row.s));
      sum.dv.add<T>(weight * static_cast<float>(1 << weight_bits<T>),
                    row_of_halves(call.d_o, row.b, row.h, row.s));
    }
  }
}

// A warp has some queries, and adds to whatever keys they point at. One of them where they are few: with
// causal the first have many peaks, one after another.
int mended_queries(const BackwardSpace& space) { return space.rows.count < 131072 ? 1 : 4; }

template <typename T>
__global__ void __launch_bounds__(row_threads)
    mend_keys(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space,
              int queries) {
  take_turn_in_chain();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / 32;
  const std::int64_t index = warp * queries + lane;
  const RowPeaks peaks(space.rows, index, lane < queries && BatchRow::of_query(call, index).owned);
  if (!__any_sync(~0u, peaks.count > 0)) return;
  KeySum sum(call, space);
  add_peaks<T>(call, space, warp * queries, peaks, sum);
  sum.flush();
}

// dk and dv of keys that several blocks shared, or where they have a peak their sums.
template <typename T, int lanes>
__device__ void join_row(const RowLanes<lanes>& at, const BatchRow& row, const KeyShares& shares,
                         const float* parts, const Rows& rows, std::int64_t dims, float factor,
                         float* unfinished) {
  const int first = at.lane * 8;
  if (!rows.wanted || first >= dims) return;
  const std::int64_t floats = KeyShares::row_floats(dims);
  float sum[8] = {};
  for (int share = 0; share < shares.count; ++share) {
    const float* own = parts + (share * shares.keys + at.row) * floats + first;
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      if (first + 4 * four >= dims) continue;
      const float4 part = *reinterpret_cast<const float4*>(own + 4 * four);
      sum[4 * four] += part.x;
      sum[4 * four + 1] += part.y;
      sum[4 * four + 2] += part.z;
      sum[4 * four + 3] += part.w;
    }
  }
  if (unfinished != nullptr) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (first + n < dims) unfinished[at.row * dims + first + n] = sum[n];
    }
    return;
  }
  const uint4 eight{pack<T>(sum[0] * factor, sum[1] * factor), pack<T>(sum[2] * factor, sum[3] * factor),
                    pack<T>(sum[4] * factor, sum[5] * factor), pack<T>(sum[6] * factor, sum[7] * factor)};
  store_eight(row_of_halves(rows, row.b, row.h, row.s), first, static_cast<int>(dims), aligned_chunks(rows),
              eight);
}

template <typename T, int lanes>
__global__ void __launch_bounds__(row_threads)
    join_shares(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  const RowLanes<lanes> at;
  const BatchRow row = BatchRow::of_key(call, at.row);
  if (!row.owned) return;
  const KeyShares& shares = space.shares;
  bool peak = false;
  for (int share = 0; share < shares.count; ++share) {
    peak = peak || shares.has_peak[share * shares.keys + at.row] != 0;
  }
  if (at.lane == 0) space.key_has_peak[at.row] = peak ? 1 : 0;
  const KeyFactors factors = key_factors<T>(call, space);
  join_row<T>(at, row, shares, shares.dk, call.dk, call.problem.dim_qk, factors.dk,
              peak ? space.dk : nullptr);
  join_row<T>(at, row, shares, shares.dv, call.dv, call.problem.dim_v, factors.dv, peak ? space.dv : nullptr);
}

// Rows of dk and dv that had a peak, from their sums. Some lanes have four keys: they are few, but together.
constexpr int finished_keys = 4;

template <typename T>
__device__ void finish_row(const Rows& rows, const BatchRow& row, const float* sums, int first, int dims,
                           float factor) {
  if (!rows.wanted || first >= dims) return;
  float sum[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) sum[n] = first + n < dims ? sums[first + n] * factor : 0.0f;
  const uint4 eight{pack<T>(sum[0], sum[1]), pack<T>(sum[2], sum[3]), pack<T>(sum[4], sum[5]),
                    pack<T>(sum[6], sum[7])};
  store_eight(row_of_halves(rows, row.b, row.h, row.s), first, dims, aligned_chunks(rows), eight);
}

template <typename T, int lanes>
__global__ void __launch_bounds__(row_threads)
    finish_keys(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  const RowLanes<lanes> at;
  const std::int64_t first = at.row * finished_keys;
  const std::int64_t dim_qk = call.problem.dim_qk;
  const std::int64_t dim_v = call.problem.dim_v;
  for (std::int64_t key = first; key < min(first + finished_keys, space.shares.keys); ++key) {
    if (space.key_has_peak[key] == 0) continue;
    const BatchRow row = BatchRow::of_key(call, key);
    if (!row.owned) continue;
    const KeyFactors factors = key_factors<T>(call, space);
    finish_row<T>(call.dk, row, space.dk + key * dim_qk, at.lane * 8, static_cast<int>(dim_qk), factors.dk);
    finish_row<T>(call.dv, row, space.dv + key * dim_v, at.lane * 8, static_cast<int>(dim_v), factors.dv);
  }
}

// Few warps a key where keys with a peak are many and the queries that see one few, else a block.
template <typename T, int lanes>
void mend_in_order(const AttentionCall& call, const BackwardSpace& space, int multiprocessors,
                   cudaStream_t stream) {
  constexpr std::int64_t block_warps = row_threads / 32;
  const std::int64_t marks = call.group() * (call.problem.length_q / PeakPlaces::queries + 1);
  const bool block_a_key = call.group() >= 4 || marks > 65;
  const std::int64_t keys = space.shares.keys;
  const Launch how{.name = "tilewise mma backward, peaks",
                   .blocks = std::min(block_a_key ? keys : (keys + block_warps - 1) / block_warps,
                                      std::int64_t{8} * multiprocessors),
                   .threads = row_threads,
                   .stream = stream,
                   .early = begins_early(call.problem.device)};
  block_a_key ? launch<mend_keys_in_order<T, lanes, block_warps>>(how, call, space)
              : launch<mend_keys_in_order<T, lanes, 1>>(how, call, space);
}

template <typename T, int lanes>
void mend(const AttentionCall& call, const BackwardSpace& space, int multiprocessors, cudaStream_t stream) {
  if (call.deterministic) {
    mend_in_order<T, lanes>(call, space, multiprocessors, stream);
  } else {
    const int queries = mended_queries(space);
    launch<mend_keys<T>>({.name = "tilewise mma backward, peaks",
                          .blocks = RowLanes<32>::blocks((space.rows.count + queries - 1) / queries),
                          .threads = row_threads,
                          .stream = stream,
                          .early = begins_early(call.problem.device)},
                         call, space, queries);
  }
  launch<finish_keys<T, lanes>>(
      {.name = "tilewise mma backward, dk",
       .blocks = RowLanes<lanes>::blocks((space.shares.keys + finished_keys - 1) / finished_keys),
       .threads = row_threads,
       .stream = stream,
       .early = begins_early(call.problem.device)},
      call, space);
}

template <typename T, int lanes>
void finish(const AttentionCall& call, const BackwardSpace& space, int multiprocessors, cudaStream_t stream) {
  launch<settle_peaks<T>>({.name = "tilewise mma backward, gradients of peaks",
                           .blocks = (space.rows.count + row_threads - 1) / row_threads,
                           .threads = row_threads,
                           .stream = stream,
                           .early = begins_early(call.problem.device)},
                          call, space);
  if (call.dq.wanted) {
    launch<finish_queries<T, lanes>>({.name = "tilewise mma backward, dq",
                                      .blocks = RowLanes<lanes>::blocks(space.rows.count),
                                      .threads = row_threads,
                                      .stream = stream,
                                      .early = begins_early(call.problem.device)},
                                     call, space);
  }
  if (!call.dk.wanted && !call.dv.wanted) return;
  if (space.shares.count > 1) {
    launch<join_shares<T, lanes>>({.name = "tilewise mma backward, shares",
                                   .blocks = RowLanes<lanes>::blocks(space.shares.keys),
                                   .threads = row_threads,
                                   .stream = stream,
                                   .early = begins_early(call.problem.device)},
                                  call, space);
  }
  mend<T, lanes>(call, space, multiprocessors, stream);
}

}  // namespace

void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  with_lanes(call, [&]<typename T, int lanes>() { finish<T, lanes>(call, space, multiprocessors, stream); });
  // Gradients of mask and sinks may be in f32, which is more than products of 16 bits and the rounded o give.
  if (space.needs_states(call)) simt::row_states(call, space.states, space.row_sums, {}, context);
  if (call.problem.features.mask_gradient) simt::mask_gradient(call, space.states, space.row_sums, context);
  if (call.dsinks != nullptr) simt::sink_gradient(call, space.states, stream);
  simt::clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::mma
