#pragma once

#include "cuda/gemm/arguments.h"
#include "cuda/gemm/pipeline.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace tilewise::cuda::gemm {

/// The lane that loads: tiles of a and b, 64 summands at a time, as places become free.
template <GemmConfig c>
struct Loader {
  static constexpr int panel_bytes = c.depth * 128;  ///< 64 summands of 64 rows of a turned matrix

  const GemmMaps& maps;
  const SharedMemory<c>& shared;
  Ring<c.stages> ring;

  __device__ void load_a(Mbarrier* full, int row, int summand) const {
    std::byte* to = shared.a(ring.stage());
    if constexpr (c.turned_a) {
#pragma unroll
      for (int p = 0; p < c.rows() / 64; ++p) {
        copy_box(to + p * panel_bytes, maps.a, full, row + 64 * p, summand);
      }
    } else {
      copy_box(to, maps.a, full, summand, row);
    }
  }

  __device__ void load_b(Mbarrier* full, int column, int summand) const {
    std::byte* to = shared.b(ring.stage());
    if constexpr (c.turned_b) {
#pragma unroll
      for (int p = 0; p < c.columns / 64; ++p) {
        copy_box(to + p * panel_bytes, maps.b, full, column + 64 * p, summand);
      }
    } else if constexpr (c.gated) {
      copy_box(to, maps.gate, full, summand, column);
      copy_box(to + c.columns / 2 * 128, maps.b, full, summand, column);
    } else {
      copy_box(to, maps.b, full, summand, column);
    }
  }

  __device__ void load(const GemmArguments& arguments) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    if constexpr (c.gated) prefetch_map(maps.gate);
    Barriers<c>& barriers = shared.barriers();
    for_each_tile<c>(arguments, [&](int row, int column) {
#pragma unroll 1
      for (int stage = 0; stage < stages_of<c>(arguments); ++stage) {
        const int summand = stage * c.depth;
        wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
        Mbarrier* full = &barriers.full[ring.stage()];
        arrive_expecting(full, c.a_bytes() + c.b_bytes());
        load_a(full, row, summand);
        load_b(full, column, summand);
        ring.advance();
      }
    });
  }
};

}  // namespace tilewise::cuda::gemm
