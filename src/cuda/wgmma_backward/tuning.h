#pragma once

#include <cstddef>

#include "cuda/mma/backward_tuning.h"

namespace tilewise::cuda::wgmma_backward {

/// How a block is cut: two warpgroups with 64 keys each, which walk over tiles of 64 queries.
struct Config {
  int dim = 0;      ///< the head dims, both, are filled up to it: 64 or 128
  int stages = 3;   ///< of queries
  static constexpr int warpgroups = 2;
  static constexpr int warps = 4 * warpgroups;
  static constexpr int keys = 64 * warpgroups;
  static constexpr int queries = 64;
  static constexpr int pair_stages = 2;  ///< of score gradients

  static constexpr int threads() { return warps * 32; }
  constexpr int key_bytes() const { return keys * dim * 2; }       ///< of k, or of v
  constexpr int query_bytes() const { return queries * dim * 2; }  ///< a stage of q, or of d_o
  static constexpr int pair_bytes() { return keys * queries * 2; }
  static constexpr int fact_bytes = 144;
  static constexpr int tile_bytes = 160;
  constexpr int barriers() const { return 2 * stages + 2 * pair_stages; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * query_bytes() +
                                    pair_stages * pair_bytes() + 2 * stages * queries * 4 + keys * 4 +
                                    fact_bytes + tile_bytes + barriers() * 8);
  }
  /// The same cut as mma's kernel has it, for what both share.
  constexpr mma::BackwardConfig cut() const {
    return {.dim = dim, .warps = warps, .queries = queries, .keys = keys, .blocks = 1};
  }
};

inline constexpr Config rows[] = {{.dim = 64}, {.dim = 128}};
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_backward
