#include <algorithm>

#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// What is left after the kernel of the gradients: dQ from its accumulator, dK and dV of keys that CTAs
// shared, and the other gradients.
//
// For dQ, a warp takes 16 queries and walks over their dims, a strip of 32 at a time. It reads whole
// fragments of 512 bytes. Then lanes that share a query exchange words, so that each writes eight consecutive
// dims.

/// The queries of one tile of DqAccumulator.
struct TileQueries {
  std::int64_t b;      ///< the sequence
  std::int64_t first;  ///< in the sequence
  std::int64_t count;  ///< at most 16; 0 where no query has the tile

  __device__ TileQueries(const AttentionCall& call, std::int64_t tile) {
    std::int64_t end;
    if (call.packed()) {
      std::int64_t high = call.problem.batch;
      for (b = 0; high - b > 1;) {
        const std::int64_t middle = (b + high) / 2;
        (DqAccumulator::first_tile(call, middle) <= tile ? b : high) = middle;
      }
      first = (tile - DqAccumulator::first_tile(call, b)) * 16;
      end = call.cumulative_q.at(b + 1) - call.cumulative_q.at(b);
    } else {
      const Division entry(tile, DqAccumulator::entry_tiles(call));
      b = entry.quotient;
      const std::int64_t run = DqAccumulator::run(call);
      const Division block(entry.remainder, (run + 15) / 16);
      first = block.quotient * run + block.remainder * 16;
      end = min((block.quotient + 1) * run, call.problem.length_q);
    }
    count = max(std::int64_t{0}, min(std::int64_t{16}, end - first));
  }
};

/// Transposes 4 x 4 words among four lanes: before, each lane has one word of each of four rows; then, the
/// four words of one row.
__device__ __forceinline__ void exchange_words(std::uint32_t (&word)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int other = 1; other < 4; other *= 2) {
    const bool upper = (lane & other) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((n & other) != 0) continue;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? word[n] : word[n + other], other);
      (upper ? word[n] : word[n + other]) = got;
    }
  }
}

/// What a warp writes of a tile: `strips` strips of 32 dims from `first_strip` on.
struct DqWork {
  std::int64_t head, tile;
  int first_strip, strips;
};

/// Writes a lane's elements of a strip in any type: of queries s and s + 8, two dims of each eight from
/// `first` on.
__device__ __forceinline__ void store_sums(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t s,
                                           const bool (&there)[2], int first, int dims, float factor,
                                           const float (&sum)[2][4][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!there[half]) continue;
    std::byte* to = rows.at(b, h, s + 8 * half);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int d = first + e / 2 * 8 + e % 2;
      if (d < dims) store_element(to + d * size_of(rows.dtype), rows.dtype, sum[half][e / 2][e % 2] * factor);
    }
  }
}

/// `wide`: the results of a piece, in f32 or in T.
template <typename T, bool wide>
__device__ __forceinline__ void finish_dq(const AttentionCall& call, const BackwardSpace& space,
                                          const DqWork& work) {
  const TileQueries queries(call, work.tile);
  if (queries.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const std::int64_t b = call.packed() ? 0 : queries.b;
  const std::int64_t s = (call.packed() ? call.first_row_q(queries.b) : 0) + queries.first + lane / 4;
  // Whether the lane's two queries exist.
  const bool there[2] = {lane / 4 < queries.count, lane / 4 + 8 < queries.count};
  std::byte* to = row_of_halves(call.dq, b, work.head, s);
  const bool aligned = aligned_chunks(call.dq);
  const float scale = static_cast<float>(call.scale) * gradient_scale<T>(call, space).down;
  float factor = scale, logit = 1;
  if (call.problem.features.logit_scale) {
    logit = logit_factor<T>(call, work.head).factor;
    factor *= static_cast<float>(call.logit_scale.at(0, work.head)) /
              logit;  // the accumulator has the factor `logit`
  }
  float logit_rows[2] = {};  // q·dQ / logit, over the lane's dims
  const int end = min(space.dq.eights, (work.first_strip + work.strips) * 4);
#pragma unroll 1
  for (int eight = work.first_strip * 4; eight < end; eight += 4) {
    const float* fragment = space.dq.at(work.head, work.tile, eight) + lane * 4;
    float sum[2][4][2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (eight + e >= end) continue;
      const float4 four = *reinterpret_cast<const float4*>(fragment + e * DqAccumulator::fragment);
      sum[0][e][0] = four.x;
      sum[0][e][1] = four.y;
      sum[1][e][0] = four.z;
      sum[1][e][1] = four.w;
    }
    if (space.logit_rows != nullptr) {
      const std::byte* q_row = row_of_halves(call.q, b, work.head, s);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int d = 8 * (eight + n / 2 % 4) + 2 * (lane % 4) + n % 2;
        if (!there[n / 8] || d >= dims) continue;
        const auto* q = reinterpret_cast<const T*>(q_row + n / 8 * 8 * call.q.stride_s * 2);
        logit_rows[n / 8] = fmaf(sum[n / 8][n / 2 % 4][n % 2], widen(q[d]), logit_rows[n / 8]);
      }
    }
    if constexpr (wide) {
      store_sums(call.dq, b, work.head, s, there, eight * 8 + lane % 4 * 2, dims, factor, sum);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t word[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) word[e] = pack<T>(sum[half][e][0] * factor, sum[half][e][1] * factor);
        exchange_words(word);
        const int first = (eight + lane % 4) * 8;
        if (!there[half] || first >= dims) continue;
        store_eight(to + 8 * half * call.dq.stride_s * 2, first, dims, aligned,
                    {word[0], word[1], word[2], word[3]});
      }
    }
  }
  if (space.logit_rows == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row = row_sum(logit_rows[half]) * scale / logit;
    if (!there[half] || lane % 4 != 0) continue;
    const std::int64_t first = work.head * call.rows_q() + call.first_row_q(queries.b) + queries.first;
    space.logit_rows[first + lane / 4 + 8 * half] = row;
  }
}

namespace {

// The factors of the accumulators of dK and dV.
struct KeyFactors {
  float dk, dv;
};
template <typename T>
__device__ KeyFactors key_factors(const AttentionCall& call, const BackwardSpace& space) {
  const float keep_scale = call.problem.features.dropout ? call.dropout.keep_scale : 1.0f;
  return {static_cast<float>(call.scale) * gradient_scale<T>(call, space).down,
          keep_scale / static_cast<float>(1 << p_scale_bits<T>)};
}

// Sums the partial dK or dV of a key in the order of the shares. `wide`: the results of a piece, in f32 or in
// T.
template <typename T, bool wide, int lanes>
__device__ void join_row(const RowLanes<lanes>& at, const BatchRow& row, const KeyShares& shares,
                         const float* partials, const Rows& rows, std::int64_t dims, float factor) {
  const int first = at.lane * 8;
  if (!rows.wanted || first >= dims) return;
  const std::int64_t floats = KeyShares::row_floats(dims);
  float sum[8] = {};
  for (int share = 0; share < shares.count; ++share) {
    const float* own = partials + (share * shares.keys + at.row) * floats + first;
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
  if constexpr (wide) {
    std::byte* to = rows.at(row.b, row.h, row.s);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (first + n < dims)
        store_element(to + (first + n) * size_of(rows.dtype), rows.dtype, sum[n] * factor);
    }
  } else {
    const uint4 eight{pack<T>(sum[0] * factor, sum[1] * factor), pack<T>(sum[2] * factor, sum[3] * factor),
                      pack<T>(sum[4] * factor, sum[5] * factor), pack<T>(sum[6] * factor, sum[7] * factor)};
    store_eight(row_of_halves(rows, row.b, row.h, row.s), first, static_cast<int>(dims), aligned_chunks(rows),
                eight);
  }
}

template <typename T, bool wide, int lanes>
__device__ void join_shares(const AttentionCall& call, const BackwardSpace& space, std::int64_t block) {
  const RowLanes<lanes> at(block);
  const BatchRow row = BatchRow::of_key(call, at.row);
  if (!row.owned) return;
  const KeyShares& shares = space.shares;
  const KeyFactors factors = key_factors<T>(call, space);
  join_row<T, wide>(at, row, shares, shares.dk, call.dk, call.problem.dim_qk, factors.dk);
  join_row<T, wide>(at, row, shares, shares.dv, call.dv, call.problem.dim_v, factors.dv);
}

// The CTAs that join shares of keys come first, then those that write dQ.
struct FinishGrid {
  std::int64_t joining;  ///< CTAs that join shares
  int dq_warps_per_tile;
  int dq_strips_per_warp;
  std::int64_t dq_warps;

  static constexpr int warps = row_threads / 32;

  template <int lanes>
  static FinishGrid of(const AttentionCall& call, const BackwardSpace& space, int multiprocessors) {
    FinishGrid grid;
    const bool shared = space.shares.count > 1 && (call.dk.wanted || call.dv.wanted);
    grid.joining = shared ? RowLanes<lanes>::blocks(space.shares.keys) : 0;
    // A warp takes a whole tile, whose queries it locates once for all dims. Where that would leave the GPU
    // partly idle, it takes one strip. Rows of dlogit_scale are summed over all dims, so they need whole
    // tiles.
    const int strips = (space.dq.eights + 3) / 4;
    const std::int64_t tiles = call.problem.heads_q * space.dq.tiles;
    grid.dq_warps_per_tile = tiles < 24 * multiprocessors && space.logit_rows == nullptr ? strips : 1;
    grid.dq_strips_per_warp = grid.dq_warps_per_tile == 1 ? strips : 1;
    grid.dq_warps = call.dq.wanted && call.problem.batch > 0 ? tiles * grid.dq_warps_per_tile : 0;
    return grid;
  }
  std::int64_t count() const { return joining + (dq_warps + warps - 1) / warps; }

  __device__ DqWork dq_work(const BackwardSpace& space, std::int64_t warp) const {
    const Division tile(warp, dq_warps_per_tile);
    const Division head(tile.quotient, space.dq.tiles);
    return {head.quotient, head.remainder, static_cast<int>(tile.remainder) * dq_strips_per_warp,
            dq_strips_per_warp};
  }
};

template <typename T, int lanes, bool wide>
__global__ void __launch_bounds__(row_threads)
    finish_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space,
                const FinishGrid grid) {
  join_pdl_chain();  // dQ, dK and dV are accumulated
  if (blockIdx.x < grid.joining) return join_shares<T, wide, lanes>(call, space, blockIdx.x);
  const std::int64_t warp = (blockIdx.x - grid.joining) * FinishGrid::warps + threadIdx.x / 32;
  if (warp < grid.dq_warps) finish_dq<T, wide>(call, space, grid.dq_work(space, warp));
}

}  // namespace

void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  with_lanes(call, [&]<typename T, int lanes>() {
    const auto grid = FinishGrid::of<lanes>(call, space, multiprocessors);
    const Launch how{.name = "tilewise mma backward, dq",
                     .blocks = grid.count(),
                     .threads = row_threads,
                     .stream = stream,
                     .early = has_pdl(call.problem.device)};
    call.problem.piece.wide_rows ? launch<finish_rows<T, lanes, true>>(how, call, space, grid)
                                 : launch<finish_rows<T, lanes, false>>(how, call, space, grid);
  });
  // The gradients of mask and sinks may be in f32: products in 16 bits and the rounded O are not exact
  // enough.
  if (space.needs_states(call)) simt::row_states(call, space.states, space.row_sums, {}, context);
  if (call.problem.features.mask_gradient) simt::mask_gradient(call, space.states, space.row_sums, context);
  if (call.dsinks != nullptr) simt::sink_gradient(call, space.states, stream);
  if (call.dlogit_scale != nullptr) simt::logit_scale_gradient(call, space.logit_rows, stream);
  simt::clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::mma
