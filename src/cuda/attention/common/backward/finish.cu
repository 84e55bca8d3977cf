#include <algorithm>

#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/backward/dq.cuh"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {
namespace {

// What is left after the kernel over tiles: dq from its sums, dk and dv of keys that blocks shared, and
// gradients beside these.

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

// The sums of a key's shares, in their order. `wide`: a piece's results, in f32 or in T.
template <typename T, bool wide, int lanes>
__device__ void join_row(const RowLanes<lanes>& at, const BatchRow& row, const KeyShares& shares,
                         const float* parts, const Rows& rows, std::int64_t dims, float factor) {
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

// Blocks that join shares, and after them blocks that make dq, one warp per tile.
struct FinishBlocks {
  std::int64_t joining;  ///< blocks
  int dq_parts;          ///< of a tile, a warp each
  int dq_part;           ///< of how many of finish_dq's parts
  std::int64_t dq_warps;

  static constexpr int warps = row_threads / 32;

  template <int lanes>
  static FinishBlocks of(const AttentionCall& call, const BackwardSpace& space, int multiprocessors) {
    FinishBlocks blocks;
    const bool shared = space.shares.count > 1 && (call.dk.wanted || call.dv.wanted);
    blocks.joining = shared ? RowLanes<lanes>::blocks(space.shares.keys) : 0;
    // A warp has a whole tile, since what it needs to know of that is the same for all dims; where that
    // leaves places free, a part.
    const int parts = (space.dq.eights + 3) / 4;
    const std::int64_t tiles = call.problem.heads_q * space.dq.tiles;
    blocks.dq_parts = tiles < 24 * multiprocessors ? parts : 1;
    blocks.dq_part = blocks.dq_parts == 1 ? parts : 1;
    blocks.dq_warps = call.dq.wanted && call.problem.batch > 0 ? tiles * blocks.dq_parts : 0;
    return blocks;
  }
  std::int64_t count() const { return joining + (dq_warps + warps - 1) / warps; }

  __device__ DqWork dq_work(const BackwardSpace& space, std::int64_t warp) const {
    const Division tile(warp, dq_parts);
    const Division head(tile.quotient, space.dq.tiles);
    return {head.quotient, head.rest, static_cast<int>(tile.rest) * dq_part, dq_part};
  }
};

template <typename T, int lanes, bool wide>
__global__ void __launch_bounds__(row_threads)
    finish_rows(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space,
                const FinishBlocks blocks) {
  take_turn_in_chain();
  if (blockIdx.x < blocks.joining) return join_shares<T, wide, lanes>(call, space, blockIdx.x);
  const std::int64_t warp = (blockIdx.x - blocks.joining) * FinishBlocks::warps + threadIdx.x / 32;
  if (warp < blocks.dq_warps) finish_dq<T, wide>(call, space, blocks.dq_work(space, warp));
}

}  // namespace

void finish_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  with_lanes(call, [&]<typename T, int lanes>() {
    const auto blocks = FinishBlocks::of<lanes>(call, space, multiprocessors);
    const Launch how{.name = "tilewise mma backward, dq",
                     .blocks = blocks.count(),
                     .threads = row_threads,
                     .stream = stream,
                     .early = begins_early(call.problem.device)};
    call.problem.piece.wide_rows ? launch<finish_rows<T, lanes, true>>(how, call, space, blocks)
                                 : launch<finish_rows<T, lanes, false>>(how, call, space, blocks);
  });
  // Gradients of mask and sinks may be in f32, which is more than products of 16 bits and the rounded o give.
  if (space.needs_states(call)) simt::row_states(call, space.states, space.row_sums, {}, context);
  if (call.problem.features.mask_gradient) simt::mask_gradient(call, space.states, space.row_sums, context);
  if (call.dsinks != nullptr) simt::sink_gradient(call, space.states, stream);
  simt::clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::mma
