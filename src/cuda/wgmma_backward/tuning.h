#pragma once

#include <cstddef>

#include "cuda/mma/backward_tuning.h"

namespace tilewise::cuda::wgmma_backward {

/// How a block is cut: two warpgroups that compute, with 64 keys each, walk over tiles of 64 queries; of a third
/// one some warps bring these, and one adds what is left to be added.
struct Config {
  int dim = 0;     ///< the head dims, both, are filled up to it: 64 or 128
  int stages = 2;  ///< of queries
  bool keys_stay = false;    ///< k in registers, as one factor of k·qᵀ
  bool values_stay = false;  ///< v, of v·d_oᵀ
  bool direct_dq = false;    ///< added from registers, not by way of shared memory
  bool whole_dq = false;     ///< a warpgroup makes all dims of every other tile's dq, not half of them of each
  bool send_early = false;
  bool own_sums = false;
  bool turns = false;  ///< one warpgroup at a time makes weights and score gradients
  static constexpr int consumers = 2;  ///< warpgroups
  static constexpr int warps = 4 * consumers;
  static constexpr int load_warps = 2;
  static constexpr int sum_warps = 2;
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
  constexpr int dq_dims() const { return whole_dq ? dim : 64; }
  constexpr int dq_bytes() const { return queries * dq_dims() * 4; }              ///< of a warpgroup
  static constexpr int rest_bytes() { return consumers * queries * 4; }  ///< a pair stage
  static constexpr int fact_bytes = 144;
  static constexpr int tile_facts = 8;
  static constexpr int tile_bytes = tile_facts * 40;
  constexpr int barriers() const { return 2 * stages + 3 * pair_stages; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(rest_bytes() * pair_stages + 2 * key_bytes() + 2 * stages * query_bytes() +
                                    pair_stages * pair_bytes() + (direct_dq ? 0 : consumers * dq_bytes()) +
                                    2 * stages * queries * 4 + keys * 4 +
                                    fact_bytes + tile_bytes + barriers() * 8);
  }
  /// The same cut as mma's kernel has it, for what both share.
  constexpr mma::BackwardConfig cut() const {
    return {.dim = dim, .warps = warps, .queries = queries, .keys = keys, .blocks = 1};
  }
};

inline constexpr Config rows[] = {
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .direct_dq = true, .whole_dq = true},
    {.dim = 128},
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .direct_dq = true, .whole_dq = true, .own_sums = true},
    {.dim = 128, .own_sums = true},
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .direct_dq = true, .whole_dq = true, .own_sums = true, .turns = true},
    {.dim = 128, .turns = true},
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .whole_dq = true, .send_early = true, .own_sums = true},
    {.dim = 128, .send_early = true},
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .whole_dq = true, .send_early = true, .own_sums = true, .turns = true},
    {.dim = 128, .send_early = true, .turns = true},
    {.dim = 64, .stages = 3, .keys_stay = true, .values_stay = true, .whole_dq = true, .own_sums = true, .turns = true},
    {.dim = 128, .send_early = true, .own_sums = true, .turns = true},
};
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_backward
