#pragma once

#include <algorithm>
#include <cstddef>

namespace tilewise::cuda::wgmma {

/// How a block of the forward kernel is cut: a warpgroup that loads, and `consumers` that have 64 queries
/// each and walk over tiles of keys. It is alone on its multiprocessor.
struct ForwardConfig {
  int dim = 0;           ///< the head dim of queries and keys is filled up to it, in panels of 64
  int dim_v = 0;         ///< that of values
  int consumers = 2;     ///< 2 or 3
  int keys = 0;          ///< a tile
  int stages = 2;        ///< tiles of keys in shared memory, and as many of values
  int query_stages = 1;  ///< tiles of queries there; o takes a tile's place before the next but one comes
  int turn_stages = 2;   ///< tiles of queries that are known beforehand
  float speed = 1;       ///< a query, with the multiprocessor busy; how rows of equal dims compare

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int rows() const { return consumers * 64; }
  /// What a consumer's queries take to load, and the place for them and for their o.
  constexpr int query_bytes() const { return 64 * dim * 2; }
  constexpr int query_place() const { return 64 * std::max(dim, dim_v) * 2; }
  constexpr int key_bytes() const { return keys * dim * 2; }
  constexpr int value_bytes() const { return keys * dim_v * 2; }
  /// Registers of a thread; together they are what a block of one a multiprocessor starts with.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 232; }
  /// Where barriers stand: behind queries, keys and values, each of which begins at a multiple of 1024.
  constexpr int tile_bytes() const {
    return query_stages * consumers * query_place() + stages * (key_bytes() + value_bytes());
  }
  constexpr int barrier_bytes() const {
    return 8 * (2 * query_stages * consumers + 4 * stages + 4 * turn_stages);
  }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + barrier_bytes());
  }

  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

/// One row a line, by dims. Of those with the smallest sufficient dims the one is taken whose tiles take the
/// least time on all multiprocessors. bench/sweep_wgmma.cu measures candidates.
struct Forward {
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 3, .query_stages = 2},
      {.dim = 64, .dim_v = 64, .consumers = 2, .keys = 128, .stages = 3, .query_stages = 2, .speed = 0.9f},
      {.dim = 128, .dim_v = 128, .consumers = 3, .keys = 80, .stages = 3, .query_stages = 2},
      {.dim = 128, .dim_v = 128, .consumers = 3, .keys = 64, .stages = 4, .query_stages = 2, .speed = 0.96f},
      {.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .query_stages = 2, .speed = 0.93f},
      {.dim = 192, .dim_v = 128, .consumers = 2, .keys = 112, .stages = 2},
      {.dim = 256, .dim_v = 256, .consumers = 2, .keys = 80, .stages = 2},
  };
};

/// The largest head dim there is a row for.
inline constexpr int most_dim = 256;

}  // namespace tilewise::cuda::wgmma
