#pragma once

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/forward/tuning.h"
#include "cuda/ptx/local.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

/// Keys or values of a block's head that lie at a stride.
struct StridedKeys {
  const std::byte* first = nullptr;  ///< key 0 of the sequence; null where they are not aligned, or in pages
  std::int64_t stride = 0;           ///< bytes

  __device__ StridedKeys(const AttentionCall& call, const QueryRows& at, const Rows& rows, bool whole_rows)
      : stride(rows.stride_s * 2) {
    if (call.problem.layout == Layout::paged || !whole_rows || !aligned_chunks(rows)) return;
    first = row_of_halves(rows, at.queries.b, at.head_kv, at.queries.sequence.first_k);
  }
};

/// What all threads of a block know in the general kernel. It lies in shared memory: it is much, seldom asked
/// for, and registers are wanted for scores and a mask's elements.
struct ForwardFacts {
  QueryRows rows;
  KeyTiles<true> tiles;
  StridedKeys k, v;
  DropoutMask dropout;
  KeyTile ahead[2];  ///< see TilesAhead

  __device__ ForwardFacts(const AttentionCall& call, const QueryRows& rows_, const ForwardConfig& c)
      : rows(rows_),
        tiles(call, rows_.queries, c.keys),
        k(call, rows_, call.k, call.problem.dim_qk == c.dim),
        v(call, rows_, call.v, call.problem.dim_v == c.dim) {
    if (call.problem.features.dropout) dropout = call.dropout.drawn();
  }
};
static_assert(sizeof(ForwardFacts) <= ForwardConfig::fact_bytes);

/// A block's tiles of keys after one another. Between two calls of take() there is a barrier: one thread
/// looks for a tile, in lists where there is a block mask, while the others compute those before.
class TilesAhead {
 public:
  __device__ explicit TilesAhead(ForwardFacts& facts_smem) : facts_smem_(facts_smem) {}
  __device__ KeyTile take() {
    const KeyTile& place = facts_smem_.ahead[turn_];
    const KeyTile tile{uniform(place.first), uniform(place.count), uniform(place.tile)};
    turn_ ^= 1;  // everyone read that one before the last barrier
    if (threadIdx.x == 0) facts_smem_.ahead[turn_] = facts_smem_.tiles.next();
    return tile;
  }

 private:
  ForwardFacts& facts_smem_;
  int turn_ = 0;
};

}  // namespace tilewise::cuda::mma
