#pragma once

#include "cuda/gemm/sm90/arguments.h"
#include "cuda/gemm/sm90/tiles/pipeline.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace tilewise::cuda::gemm {

/// The lane that loads tiles of A and B, 64 of K at a time, as stages become free. Of what a pair of CTAs
/// shares it loads half, into both.
template <GemmConfig c>
struct Loader {
  static constexpr int panel_bytes = c.depth * 128;  ///< of a transposed matrix: 64 of K by 64 rows

  const GemmMaps& maps;
  const SharedMemory<c>& shared;
  Ring<c.stages> ring;

  /// Which half of the shared operand this CTA loads.
  static __device__ int half(Pair pair) { return c.pair == pair ? place_in_pair() : 0; }

  template <Pair pair>
  static __device__ void copy(std::byte* to, const CUtensorMap& map, Mbarrier* full, int column, int row) {
    if constexpr (c.pair == pair) {
      copy_box_to_both(to, map, full, column, row);
    } else {
      copy_box(to, map, full, column, row);
    }
  }

  /// Copies panels of 64 rows of a transposed matrix.
  template <Pair pair, int panels>
  static __device__ void copy_panels(std::byte* to, const CUtensorMap& map, Mbarrier* full, int row, int k) {
    constexpr int count = c.pair == pair ? panels / 2 : panels;
    const int first = half(pair) * count;
#pragma unroll
    for (int p = 0; p < count; ++p) {
      copy<pair>(to + (first + p) * panel_bytes, map, full, row + 64 * (first + p), k);
    }
  }

  __device__ void load_a(Mbarrier* full, int row, int k) const {
    std::byte* to = shared.a(ring.stage());
    if constexpr (c.transposed_a) {
      copy_panels<Pair::shares_a, c.rows() / 64>(to, maps.a, full, row, k);
    } else {
      const int first = half(Pair::shares_a) * c.a_box();
      copy<Pair::shares_a>(to + first * 128, maps.a, full, k, row + first);
    }
  }

  __device__ void load_b(Mbarrier* full, int column, int k) const {
    std::byte* to = shared.b(ring.stage());
    if constexpr (c.transposed_b) {
      copy_panels<Pair::shares_b, c.columns / 64>(to, maps.b, full, column, k);
    } else if constexpr (c.gated) {
      const bool both = c.pair != Pair::shares_b;
      if (both || place_in_pair() == 0) copy<Pair::shares_b>(to, maps.gate, full, k, column);
      if (both || place_in_pair() == 1) {
        copy<Pair::shares_b>(to + c.columns / 2 * 128, maps.b, full, k, column);
      }
    } else {
      const int first = half(Pair::shares_b) * (c.columns - c.b_box());
      copy<Pair::shares_b>(to + first * 128, maps.b, full, k, column + first);
    }
  }

  __device__ void load(const GemmArguments& arguments) {
    Barriers<c>& barriers = shared.barriers();
    for_each_tile<c>(arguments, [&](int row, int column) {
#pragma unroll 1
      for (int stage = 0; stage < stages_of<c>(arguments); ++stage) {
        const int k = stage * c.depth;
        wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
        Mbarrier* full = &barriers.full[ring.stage()];
        arrive_expecting(full, c.loaded_bytes());
        load_a(full, row, k);
        load_b(full, column, k);
        ring.advance();
      }
    });
  }
};

}  // namespace tilewise::cuda::gemm
