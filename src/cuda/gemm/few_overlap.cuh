#pragma once

#include <cuda.h>

#include "cuda/gemm/arguments.h"
#include "cuda/gemm/few_share.h"
#include "cuda/gemm/few_tiles.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace tilewise::cuda::gemm {

// Between two products of a network memory has nothing to do for some microseconds: from the first's last
// load, through what its blocks leave to each other, its end and the second's first tokens, until the second
// has multiplied what its places held. Weights of the second can come to the L2 meanwhile.

/// Of a network's products, for stamps: the first has an activation.
__device__ __forceinline__ int number_of(const Epilogue& epilogue) {
  return epilogue.activation == Activation::none ? 1 : 0;
}

/// What a block of a product reads behind what its places hold, in boxes of 32 rows and 256 summands.
struct FewReads {
  int row, row_groups;
  int begin, count;  ///< pieces of 256 summands
  int first;         ///< of them, to be read next; past the last come those at the beginning

  __device__ __forceinline__ int steps() const { return row_groups * count; }
  __device__ __forceinline__ void bring(const CUtensorMap& map, int step) const {
    prefetch_box(map, 0, begin + (first + step / row_groups) % count, row + step % row_groups * 32);
  }
};

/// A product's weights in the order its blocks read them.
struct FewWeights {
  static constexpr int piece = 256;
  CUtensorMap map;  ///< of runs, 32 rows of one piece
  FewTiles tiles;   ///< where there are some; else by runs of units
  FewShare share;
  int held = 0;  ///< units that places hold

  __device__ __forceinline__ FewReads of(int block) const {
    if (block >= (tiles.tiles > 0 ? tiles.blocks() : share.blocks)) return {0, 1, 0, 0, 0};
    return tiles.tiles > 0 ? tile(block) : run(block);
  }

 private:
  __device__ __forceinline__ FewReads tile(int block) const {
    const int tile = block % tiles.tiles, split = block / tiles.tiles;
    const int begin = tiles.begin(split) * tiles.summands / piece;
    const int end = ((tiles.begin(split) + tiles.count(split)) * tiles.summands + piece - 1) / piece;
    const int next = (tiles.turned(tile) + held) % max(tiles.count(split), 1);
    return {.row = tile * tiles.rows,
            .row_groups = (tiles.rows + 31) / 32,
            .begin = begin,
            .count = end - begin,
            .first = next * tiles.summands / piece};
  }
  /// Of a run what it has of the rows it begins with.
  __device__ __forceinline__ FewReads run(int block) const {
    constexpr int in_piece = piece / 64;
    const int row_block = share.begin(block) / share.depth_blocks;
    const int first = share.begin(block) - row_block * share.depth_blocks + held;
    const int end = min(share.end(block) - row_block * share.depth_blocks, share.depth_blocks);
    return {.row = row_block * 128,
            .row_groups = 4,
            .begin = first / in_piece,
            .count = max((end + in_piece - 1) / in_piece - first / in_piece, 0),
            .first = 0};
  }
};

/// By which blocks of the first product tell those of the second that their columns are written, so that
/// these read them without waiting for the first to have ended. A block takes its flags down when it starts,
/// before it lets the second begin: in a graph they are still up from the time before.
struct FewHandover {
  std::uint32_t* flags = nullptr;  ///< none: the second waits for the first's end
  int count = 0;                   ///< two for each block of the first that writes
  std::uint32_t owner = 0;         ///< the word that says so, which no other network has

  __device__ __forceinline__ void take_down(int block) const {
    if (flags == nullptr || 2 * block >= count) return;
    flags[2 * block] = flags[2 * block + 1] = 0;
    __threadfence();
  }
  /// By one thread of a warpgroup, all of whose threads have written and met.
  __device__ __forceinline__ void hand_over(int block, int warpgroup) const {
    if (2 * block < count) raise_flag(flags + 2 * block + warpgroup, owner);
  }
  /// By a whole warp, of which any thread copies from there afterwards.
  __device__ __forceinline__ void await(int lane) const {
    for (int flag = lane; flag < count; flag += 32) await_flag_for_long(flags + flag, owner);
    __syncwarp();
    fence_async_proxy_everywhere();
  }
};

/// How a product stands to the one ahead of it or behind it in a network.
struct FewOverlap {
  bool late = false;  ///< the product behind may begin when the last weights are under way, not at once
  int opening = 0;    ///< boxes of its own that come to the L2 while the kernel ahead is at work
  int bridge = 0;     ///< boxes of the product behind, once the last of its own are under way
  int pace = 0;       ///< clocks from one of these to the next, at least
  FewWeights own{}, behind{};
  FewHandover gives{}, takes{};

  __device__ __forceinline__ void open() const {
    if (opening == 0) return;
    const FewReads reads = own.of(block());
    for (int step = 0; step < min(opening, reads.steps()); ++step) reads.bring(own.map, step);
  }
  /// In one thread. Once the block is over, nothing waits.
  template <typename IsOver>
  __device__ __forceinline__ void go_over(const IsOver& is_over) const {
    if (bridge == 0) return;
    const FewReads reads = behind.of(block());
    for (int step = 0; step < min(bridge, reads.steps()); ++step) {
      reads.bring(behind.map, step);
      const long long begin = clock64();
      while (clock64() - begin < pace && !is_over()) {
      }
    }
  }

 private:
  __device__ __forceinline__ static int block() {
    return static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x);
  }
};

}  // namespace tilewise::cuda::gemm
