#pragma once

#include <cstddef>

namespace tilewise::cuda::wgmma_tma {

/// How a CTA is cut. Two consumer warpgroups keep 64 keys each and walk over tiles of queries, which a
/// producer warpgroup brings by TMA.
struct Config {
  int dim = 0;           ///< both head dims are padded to it: 64 or 128
  int queries = 0;       ///< of a tile: 64, or 128 at dim 64
  bool general = false;  ///< takes softcap, ALiBi, masks and dropout
  int stages = 2;        ///< of Q and dO
  static constexpr int keys = 128;
  static constexpr int consumers = 2;
  static constexpr int consumer_warps = 4 * consumers;
  static constexpr int consumer_threads = 128 * consumers;
  static constexpr int threads = consumer_threads + 128;
  static constexpr int ds_stages = 2;
  /// dQ of a consumer is 64 dims x 64 queries, transposed; a warp has 16 of the dims.
  static constexpr int warp_dq_floats = 16 * 64;
  static constexpr int kept_words = keys / 32;  ///< bits of the keys of a query

  static constexpr int producer_registers = 24;
  static constexpr int consumer_registers = 240;
  /// A CTA begins with 168 registers per thread, as many as 384 threads can have. More cannot be handed out.
  static_assert(128 * producer_registers + consumer_threads * consumer_registers <= 168 * threads);

  /// Who computes dQ of 64 dims and 64 queries. At dim 128 each consumer has half of the dims, at dim 64 half
  /// of 128 queries. With 64 queries there is nothing to share: consumers take turns, tile by tile.
  constexpr bool dq_in_turn() const { return dim == 64 && queries == 64; }
  constexpr bool dq_by_dims() const { return dim > 64; }

  constexpr int key_bytes() const { return keys * dim * 2; }       ///< of K, or of V
  constexpr int query_bytes() const { return queries * dim * 2; }  ///< a stage of Q, or of dO
  constexpr int ds_bytes() const { return keys * queries * 2; }    ///< a stage
  constexpr int kept_bytes() const { return kept_words * queries * 4; }
  constexpr int row_values() const {
    return general ? 3 : 2;
  }  ///< LSE, delta, and the general kernel's offset
  constexpr int barriers() const { return 4 * stages + 1 + (general ? 6 : 0); }

  /// Values of rows, barriers and Words, up to where a mask may begin.
  constexpr int value_bytes() const {
    return (row_values() * stages * queries * 4 + barriers() * 8 + 16 + 1023) / 1024 * 1024;
  }

  /// `mask_bytes` and `kept_stages` of the general kernel depend on the call.
  constexpr std::size_t shared_bytes(int mask_bytes = 0, int kept_stages = 0) const {
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * query_bytes() + ds_stages * ds_bytes() +
                                    consumer_warps * warp_dq_floats * 4 + value_bytes() + mask_bytes +
                                    kept_stages * kept_bytes());
  }
};

inline constexpr Config rows[] = {{.dim = 64, .queries = 128},
                                  {.dim = 128, .queries = 64},
                                  {.dim = 64, .queries = 64, .general = true},
                                  {.dim = 128, .queries = 64, .general = true}};
inline constexpr int most_dim = 128;
inline constexpr std::size_t most_shared_bytes = 232448;  ///< of a CTA on Hopper
static_assert(rows[0].shared_bytes() <= most_shared_bytes && rows[1].shared_bytes() <= most_shared_bytes);
// A mask of f32, and one of 16 bits, with dropout.
static_assert(rows[3].shared_bytes(64 * 128 * 4, 1) <= most_shared_bytes);
static_assert(rows[3].shared_bytes(64 * 128 * 2, 2) <= most_shared_bytes);

}  // namespace tilewise::cuda::wgmma_tma
