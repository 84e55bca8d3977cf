#include <algorithm>

#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/backward/dq.cuh"
#include "cuda/attention/common/backward/ordered_keys.cuh"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/common/backward/tile_peaks.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

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

// The threads of a block for which something holds, in order, which then share what is to be done for them.
struct ListedThreads {
  int count = 0;
  const std::uint8_t* thread_smem;

  // All threads of the block are here.
  __device__ __forceinline__ explicit ListedThreads(bool listed) {
    constexpr int warps = row_threads / 32;
    __shared__ int warp_counts[warps];
    __shared__ std::uint8_t threads[row_threads];
    static_assert(row_threads <= 256, "a byte each");
    const auto own = static_cast<int>(threadIdx.x);
    const int warp = own / 32, lane = own % 32;
    const unsigned lanes = __ballot_sync(~0u, listed);
    if (lane == 0) warp_counts[warp] = __popc(lanes);
    __syncthreads();  // counts are there
    int before = 0;
#pragma unroll
    for (int n = 0; n < warps; ++n) {
      if (n == warp) before = count;
      count += warp_counts[n];
    }
    if (listed) threads[before + __popc(lanes & ((1u << lane) - 1))] = static_cast<std::uint8_t>(own);
    __syncthreads();  // the list is
    thread_smem = threads;
  }
};

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
template <int lane_dims>
struct KeySum {
  const BackwardSpace& space;
  std::int64_t key = -1;  // which of [Hkv, rows_k]
  LaneVector<lane_dims> dk, dv;

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
  __device__ static void move(LaneVector<lane_dims>& from, float* to) {
    from.each([&](int d, float& x) {
      atomicAdd(to + d, x);
      x = 0;
    });
  }
};

// Adds what peaks add. A lane has one of the queries for the numbers; then all lanes have the vectors of some
// of them, which are loaded together, since each takes long to come.
template <typename T, int lane_dims>
__device__ __forceinline__ void add_peaks(const AttentionCall& call, const BackwardSpace& space,
                                          const RowPeaks& peaks, KeySum<lane_dims>& sum) {
  constexpr int together = 8 / lane_dims;
  const auto take_lane = [](unsigned& lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    lanes &= lanes - 1;
    return lane;
  };
  for (int f = 0; __any_sync(~0u, f < peaks.count); ++f) {
    Peak peak{};
    if (f < peaks.count) peak = peaks.at(f);
    unsigned left = __ballot_sync(~0u, f < peaks.count);
    while (left != 0) {
      T q[together][lane_dims], d_o[together][lane_dims];
      std::int64_t key[together];
      unsigned loading = left;
#pragma unroll
      for (int n = 0; n < together; ++n) {
        if (loading == 0) continue;
        const int from = take_lane(loading);
        const BatchRow row = BatchRow::of_query(call, __shfl_sync(~0u, peaks.row, from));
        sum.dk.load(q[n], row_of_halves(call.q, row.b, row.h, row.s));
        sum.dv.load(d_o[n], row_of_halves(call.d_o, row.b, row.h, row.s));
        key[n] = space.key_row(call, row.b, call.key_head(row.h), __shfl_sync(~0u, peak.key, from));
      }
#pragma unroll
      for (int n = 0; n < together; ++n) {
        if (left == 0) continue;
        const int from = take_lane(left);
        const float weight = fmaxf(0.0f, __shfl_sync(~0u, peak.weight, from));
        sum.turn_to(key[n]);
        sum.dk.add(__shfl_sync(~0u, peak.x, from), q[n]);
        sum.dv.add(weight * static_cast<float>(1 << weight_bits<T>), d_o[n]);
      }
    }
  }
}

// A block has `count` queries from `first` on, and adds to whatever keys they point at. With causal it is the
// first queries that have peaks, and many: so its warps share those that have some.
template <typename T, int lanes>
__device__ void mend_keys(const AttentionCall& call, const BackwardSpace& space, std::int64_t first,
                          int count) {
  constexpr int warps = row_threads / 32;
  const auto own = static_cast<int>(threadIdx.x);
  const int warp = own / 32, lane = own % 32;
  const ListedThreads having(own < count && BatchRow::of_query(call, first + own).owned &&
                             space.rows.peak_count[first + own] > 0);
  if (having.count == 0) return;
  const int from = having.count * warp / warps, to = having.count * (warp + 1) / warps;
  const bool mine = from + lane < to;
  const std::int64_t row = first + (mine ? having.thread_smem[from + lane] : 0);
  KeySum<lanes / 4> sum(call, space);
  add_peaks<T>(call, space, RowPeaks(space.rows, row, mine), sum);
  sum.flush();
}

// Blocks that add what peaks add to keys, among blocks that make dq, a warp a tile. The first have little to
// do but wait long, for one peak after another; the others wait for memory alone.
struct FinishBlocks {
  int mended_queries;    ///< of a block
  std::int64_t mending;  ///< blocks
  std::int64_t round;    ///< one block of so many mends, as long as there is something to mend
  int dq_parts;          ///< of a tile, a warp each
  int dq_part;           ///< of how many of finish_dq's parts
  std::int64_t dq_warps;

  static constexpr int warps = row_threads / 32;

  FinishBlocks(const AttentionCall& call, const BackwardSpace& space, int multiprocessors) {
    const std::int64_t queries = space.rows.count;
    const std::int64_t each = queries / (8 * multiprocessors);
    mended_queries =
        static_cast<int>(std::clamp<std::int64_t>((each + warps - 1) / warps * warps, warps, row_threads));
    const bool keys = !call.deterministic && (call.dk.wanted || call.dv.wanted);
    mending = keys ? (queries + mended_queries - 1) / mended_queries : 0;
    // A warp has a whole tile, since what it needs to know of that is the same for all dims; where that
    // leaves places free, a part.
    const int parts = (space.dq.eights + 3) / 4;
    const std::int64_t tiles = call.problem.heads_q * space.dq.tiles;
    dq_parts = tiles < 24 * multiprocessors ? parts : 1;
    dq_part = dq_parts == 1 ? parts : 1;
    dq_warps = call.dq.wanted && call.problem.batch > 0 ? tiles * dq_parts : 0;
    round = std::max<std::int64_t>(1, count() / std::max<std::int64_t>(1, mending));
  }
  std::int64_t count() const { return mending + (dq_warps + warps - 1) / warps; }

  /// What a block has, of one kind.
  struct Share {
    bool mends;
    std::int64_t index;
  };
  __device__ Share share() const {
    const Division place(blockIdx.x, round);
    if (place.rest == 0 && place.quotient < mending) return {true, place.quotient};
    return {false, blockIdx.x - min(mending, place.quotient + 1)};
  }
  __device__ DqWork dq_work(const BackwardSpace& space, std::int64_t warp) const {
    const Division tile(warp, dq_parts);
    const Division head(tile.quotient, space.dq.tiles);
    return {head.quotient, head.rest, static_cast<int>(tile.rest) * dq_part, dq_part};
  }
};

template <typename T, int lanes>
__global__ void __launch_bounds__(row_threads, 3)
    finish_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space,
                const FinishBlocks blocks) {
  take_turn_in_chain();
  const FinishBlocks::Share share = blocks.share();
  if (share.mends) {
    mend_keys<T, lanes>(call, space, share.index * blocks.mended_queries, blocks.mended_queries);
    return;
  }
  const std::int64_t warp = share.index * FinishBlocks::warps + threadIdx.x / 32;
  if (warp < blocks.dq_warps) finish_dq<T>(call, space, blocks.dq_work(space, warp));
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

// Rows of dk and dv that had a peak, from their sums. They are few, but together: so a block has many keys,
// and its lanes share those that have one.
template <typename T, int lanes>
__global__ void __launch_bounds__(row_threads)
    finish_keys(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  const std::int64_t first = std::int64_t{blockIdx.x} * row_threads;
  const std::int64_t own = first + threadIdx.x;
  const ListedThreads having(own < space.shares.keys && BatchRow::of_key(call, own).owned &&
                             space.key_has_peak[own] != 0);
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  const int first_dim = static_cast<int>(threadIdx.x) % lanes * 8;
  for (int n = static_cast<int>(threadIdx.x) / lanes; n < having.count; n += row_threads / lanes) {
    const std::int64_t key = first + having.thread_smem[n];
    const BatchRow row = BatchRow::of_key(call, key);
    const KeyFactors factors = key_factors<T>(call, space);
    finish_row<T>(call.dk, row, space.dk + key * dim_qk, first_dim, dim_qk, factors.dk);
    finish_row<T>(call.dv, row, space.dv + key * dim_v, first_dim, dim_v, factors.dv);
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
void finish(const AttentionCall& call, const BackwardSpace& space, int multiprocessors, cudaStream_t stream) {
  const auto of_rows = [&](const char* name, std::int64_t blocks) {
    return Launch{.name = name,
                  .blocks = blocks,
                  .threads = row_threads,
                  .stream = stream,
                  .early = begins_early(call.problem.device)};
  };
  launch<settle_peaks<T>>(of_rows("tilewise mma backward, gradients of peaks",
                                  (space.rows.count + row_threads - 1) / row_threads),
                          call, space);
  const bool keys = call.dk.wanted || call.dv.wanted;
  if (keys && space.shares.count > 1) {
    launch<join_shares<T, lanes>>(
        of_rows("tilewise mma backward, shares", RowLanes<lanes>::blocks(space.shares.keys)), call, space);
  }
  const FinishBlocks blocks(call, space, multiprocessors);
  launch<finish_rows<T, lanes>>(of_rows("tilewise mma backward, dq and peaks", blocks.count()), call, space,
                                blocks);
  if (!keys) return;
  if (call.deterministic) mend_in_order<T, lanes>(call, space, multiprocessors, stream);
  launch<finish_keys<T, lanes>>(
      of_rows("tilewise mma backward, dk", (space.shares.keys + row_threads - 1) / row_threads), call, space);
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
