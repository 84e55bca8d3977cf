#pragma once

#include "cuda/gemm/sm90/arguments.h"
#include "cuda/gemm/sm90/tiles/tuning.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::gemm {

/// `full` completes a phase when a stage's tiles of A and B have arrived, `empty` when every warp that reads
/// them, in both CTAs of a pair, has released them. Producer and consumers continue their rings of stages
/// from one tile of the result to the next, so that the next tile is loaded while this one is stored.
template <GemmConfig c>
struct Barriers {
  Mbarrier full[c.stages], empty[c.stages];

  /// Called by one thread, before a CTA-wide barrier.
  __device__ void init() {
    for (int stage = 0; stage < c.stages; ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], 4 * c.consumers * c.blocks());
    }
    fence_barrier_inits();
  }
};

/// A CTA's shared memory: stages of A, stages of B, the warps' slabs, the mbarriers.
template <GemmConfig c>
struct SharedMemory {
  static_assert(sizeof(Barriers<c>) == c.barrier_bytes());
  static_assert(c.a_bytes() % 1024 == 0 && c.b_bytes() % 1024 == 0);
  static_assert(c.shared_bytes() <= 232448);  // the most a CTA can have on Hopper

  std::byte* first;

  __device__ std::byte* a(int stage) const { return first + stage * c.a_bytes(); }
  __device__ std::byte* b(int stage) const { return a(c.stages) + stage * c.b_bytes(); }
  __device__ std::byte* slabs(int warp) const { return first + c.tile_bytes() + warp * (2 * c.slab_bytes()); }
  __device__ Barriers<c>& barriers() const {
    return *reinterpret_cast<Barriers<c>*>(first + c.tile_bytes() + c.slabs_bytes());
  }
};

/// How many times a stage is filled for one tile of the result: K in units of c.depth, rounded up.
template <GemmConfig c>
__device__ __forceinline__ int stages_of(const GemmArguments& arguments) {
  return (arguments.k + c.depth - 1) / c.depth;
}

/// The CTA's tiles in order. Finding the place of a tile takes two divisions, hundreds of clocks, so the
/// caller decides when find() is called.
template <GemmConfig c>
class Tiles {
 public:
  int row = 0, column = 0;  ///< the tile's first, in the result; set by find()

  __device__ __forceinline__ explicit Tiles(const GemmArguments& arguments)
      : order_(arguments.order), index_(static_cast<int>(blockIdx.x) / c.blocks()) {}
  /// Whether there is a tile.
  __device__ __forceinline__ bool more() const { return index_ < order_.total(); }
  __device__ __forceinline__ void advance() { index_ += static_cast<int>(gridDim.x) / c.blocks(); }
  __device__ __forceinline__ void find() {
    const TilePlace place = order_.place(index_);
    row = place.m * c.rows_together();
    column = place.n * c.columns_together();
    if (c.pair == Pair::shares_a) column += rank_in_pair() * c.out_columns();
    if (c.pair == Pair::shares_b) row += rank_in_pair() * c.rows();
  }

 private:
  const TileOrder& order_;
  int index_;
};

/// Calls `body` with the first row and column of each of the CTA's tiles.
template <GemmConfig c, typename Body>
__device__ __forceinline__ void for_each_tile(const GemmArguments& arguments, const Body& body) {
#pragma unroll 1
  for (Tiles<c> tiles(arguments); tiles.more(); tiles.advance()) {
    tiles.find();
    body(tiles.row, tiles.column);
  }
}

}  // namespace tilewise::cuda::gemm
