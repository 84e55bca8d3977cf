#pragma once

#include <utility>

#include "cuda/gemm/sm90/arguments.h"
#include "cuda/gemm/sm90/tiles/pipeline.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace tilewise::cuda::gemm {

/// The accumulators of a consumer's part of a tile, in wgmma's layout.
template <GemmConfig c>
using Accumulators = float[c.row_tiles][c.columns / 2];

/// An argument of multiply(): no work to overlap with the mainloop.
struct NoOverlap {
  static constexpr int steps = 0;
  template <int>
  __device__ void step() {}
};

/// A consumer warpgroup. The products of a stage run while it waits for the next stage. A stage is released
/// when the products of the one after it have been started.
template <typename T, GemmConfig c>
struct Consumer {
  Barriers<c>& barriers;
  const TileDescriptor a_tile, b_tile;  ///< of stage 0
  Ring<c.stages> ring;
  Accumulators<c> accumulators;

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  // 64 rows of A are 8 KB, transposed or not: 64 rows by 64 of K, or the other way round.
  __device__ __forceinline__ Consumer(const SharedMemory<c>& shared, int index)
      : barriers(shared.barriers()),
        a_tile(describe_tile(address(shared.a(0)) + index * c.consumer_rows() * 128, 0)),
        b_tile(describe_tile(address(shared.b(0)), c.depth * 128)) {}

  __device__ __forceinline__ void release(int stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (c.pair == Pair::none) {
      if (lane == 0) arrive(&barriers.empty[stage]);
    } else {
      if (lane < c.blocks()) arrive_in(lane, &barriers.empty[stage]);  // one lane for each CTA
    }
  }

  __device__ __forceinline__ void start_products(bool add) {
    const TileDescriptor a = a_tile + ring.stage() * (c.a_bytes() / 16);
    const TileDescriptor b = b_tile + ring.stage() * (c.b_bytes() / 16);
    // Descriptors count units of 16 bytes. The next 16 of K are 16 rows of 128 bytes further if transposed,
    // else 32 bytes further in the same row.
    constexpr int a_step = c.transposed_a ? 16 * 128 / 16 : 32 / 16;
    constexpr int b_step = c.transposed_b ? 16 * 128 / 16 : 32 / 16;
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) pin(accumulators[r]);
    fence_products();
#pragma unroll
    for (int step = 0; step < c.depth / 16; ++step) {
#pragma unroll
      for (int r = 0; r < c.row_tiles; ++r) {
        WarpgroupProduct<T, c.columns>::template from_shared<c.transposed_a, c.transposed_b>(
            accumulators[r], a + r * (64 * 128 / 16) + step * a_step, b + step * b_step, add || step > 0);
      }
    }
    commit_products();
  }

  /// Starts the products of one more stage and releases the stage before.
  __device__ __forceinline__ void multiply_stage(int& before) {
    wait(&barriers.full[ring.stage()], ring.parity());
    start_products(true);
    wait_products<1>();
    release(before);
    before = ring.stage();
    ring.advance();
  }

  /// Multiplies `stages` stages into accumulators that start from 0. While the products of the first stage
  /// run, the warp calls meanwhile() and overlap.step<0>(); while those of stage n run, it calls
  /// overlap.step<n>(), for the first `overlap.steps` stages. Steps that there are no stages for are called
  /// afterwards.
  template <typename Overlap, typename Meanwhile>
  __device__ __forceinline__ void accumulate(int stages, Overlap& overlap, const Meanwhile& meanwhile) {
    wait(&barriers.full[ring.stage()], ring.parity());
    start_products(false);
    int before = ring.stage();
    ring.advance();
    meanwhile();
    [&]<int... step>(std::integer_sequence<int, step...>) {
      ((step > 0 && step < stages ? multiply_stage(before) : void(), overlap.template step<step>()), ...);
    }(std::make_integer_sequence<int, Overlap::steps>{});
#pragma unroll 1
    for (int stage = max(1, Overlap::steps); stage < stages; ++stage) multiply_stage(before);
    wait_products<0>();
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) pin(accumulators[r]);
    release(before);
  }

  /// The mainloop of a tile. Where the result is f32, the accumulators are added to totals every
  /// `promotion_interval` stages. meanwhile() is called while products run.
  template <typename Overlap, typename Meanwhile>
  __device__ __forceinline__ void multiply(int stages, Overlap& overlap, const Meanwhile& meanwhile) {
    if constexpr (!c.out_f32) {
      accumulate(stages, overlap, meanwhile);
    } else {
      Accumulators<c> totals = {};
      NoOverlap no_overlap;
      meanwhile();
#pragma unroll 1
      for (int stage = 0; stage < stages; stage += c.promotion_interval) {
        accumulate(min(c.promotion_interval, stages - stage), no_overlap, [] {});
#pragma unroll
        for (int n = 0; n < c.row_tiles * c.columns / 2; ++n) {
          totals[n / (c.columns / 2)][n % (c.columns / 2)] +=
              accumulators[n / (c.columns / 2)][n % (c.columns / 2)];
        }
      }
#pragma unroll
      for (int n = 0; n < c.row_tiles * c.columns / 2; ++n) {
        accumulators[n / (c.columns / 2)][n % (c.columns / 2)] =
            totals[n / (c.columns / 2)][n % (c.columns / 2)];
      }
    }
  }
};

}  // namespace tilewise::cuda::gemm
