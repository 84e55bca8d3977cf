#pragma once

#include <cstddef>

namespace tilewise::cuda::wgmma_tma {

/// How a CTA is cut. Two consumer warpgroups keep 64 keys each and walk over tiles of queries, which a
/// producer warpgroup brings by TMA.
struct Config {
  int dim = 0;      ///< both head dims are padded to it: 64 or 128
  int queries = 0;  ///< of a tile: 128 at dim 64, where each consumer computes dQ of 64 of them, else 64
  int stages = 2;   ///< of Q and dO
  static constexpr int keys = 128;
  static constexpr int consumers = 2;
  static constexpr int consumer_warps = 4 * consumers;
  static constexpr int consumer_threads = 128 * consumers;
  static constexpr int threads = consumer_threads + 128;
  static constexpr int consumer_registers = 240;
  static constexpr int producer_registers = 24;
  static constexpr int ds_stages = 2;
  /// dQ of a consumer is 64 dims x 64 queries, transposed; a warp has 16 of the dims.
  static constexpr int warp_dq_floats = 16 * 64;

  constexpr int key_bytes() const { return keys * dim * 2; }       ///< of K, or of V
  constexpr int query_bytes() const { return queries * dim * 2; }  ///< a stage of Q, or of dO
  constexpr int ds_bytes() const { return keys * queries * 2; }    ///< a stage
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * query_bytes() + ds_stages * ds_bytes() +
                                    consumer_warps * warp_dq_floats * 4 + 2 * stages * queries * 4 +
                                    (4 * stages + 1) * 8);
  }
};

inline constexpr Config rows[] = {{.dim = 64, .queries = 128}, {.dim = 128, .queries = 64}};
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_tma
