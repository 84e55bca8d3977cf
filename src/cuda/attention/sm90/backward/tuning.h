#pragma once

#include <cstddef>
#include <string_view>

#include "cuda/attention/common/backward/config.h"

namespace tilewise::cuda::wgmma_backward {

/// How a block is cut: two warpgroups that compute, with 64 keys each, walk over tiles of 64 queries; of a
/// third one two warps bring these.
struct Config {
  int dim = 0;                         ///< the head dims, both, are filled up to it: 64 or 128
  int stages = 2;                      ///< of queries
  bool rows_stay = false;              ///< k and v in registers, as one factor of k·qᵀ and v·d_oᵀ
  bool turns = false;                  ///< one warpgroup at a time makes weights and score gradients
  static constexpr int consumers = 2;  ///< warpgroups
  static constexpr int warps = 4 * consumers;
  static constexpr int load_warps = 2;
  static constexpr int keys = 64 * consumers;
  static constexpr int queries = 64;
  static constexpr int pair_stages = 2;  ///< of score gradients
  static constexpr int consumer_registers = 240;
  static constexpr int producer_registers = 24;

  static constexpr int threads() { return 128 * (consumers + 1); }
  static constexpr int consumer_threads() { return 128 * consumers; }
  constexpr int key_bytes() const { return keys * dim * 2; }       ///< of k, or of v
  constexpr int query_bytes() const { return queries * dim * 2; }  ///< a stage of q, or of d_o
  static constexpr int pair_bytes() { return keys * queries * 2; }
  static constexpr int dq_bytes() { return queries * 64 * 4; }  ///< of a warpgroup
  static constexpr int fact_bytes = 144;
  static constexpr int tile_facts = 8;
  static constexpr int tile_bytes = tile_facts * 24;
  constexpr int barriers() const { return 2 * stages + 2 * pair_stages; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * query_bytes() +
                                    pair_stages * pair_bytes() + consumers * dq_bytes() +
                                    2 * stages * queries * 4 + fact_bytes + tile_bytes + barriers() * 8);
  }
  /// The same cut as mma's kernel has it, for what both share.
  constexpr mma::BackwardConfig cut() const {
    return {.dim = dim, .warps = warps, .queries = queries, .keys = keys, .blocks = 1};
  }
};

inline constexpr Config rows[] = {
    {.dim = 64, .stages = 3, .rows_stay = true},
    {.dim = 128, .turns = true},
};
/// The table of those rows.
struct Backward {
  static constexpr std::string_view name = "attention.sm90.backward";
  static constexpr const auto& rows = wgmma_backward::rows;
};
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_backward
