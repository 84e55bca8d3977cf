#pragma once

#include <algorithm>
#include <cstddef>

namespace tilewise::cuda::wgmma {

/// The largest head dims there are rows for.
inline constexpr int most_dim = 256;
inline constexpr int most_dim_with_softcap = 128;
inline constexpr int most_dim_with_mask = 128;

/// What a tile of queries takes in microseconds on an H200: `start`, and `step` for each of its tiles of
/// keys.
struct TileTime {
  float start = 1;
  float step = 1;
  friend constexpr bool operator==(const TileTime&, const TileTime&) = default;
};

/// How many queries, and fewer, `mma` is better for, measured on an H200: by a factor of 2 at one query of 32
/// heads over 8 and batch 64, by 1.1 at 16 queries; at 64 it takes 1.4 times as long.
inline constexpr int few_queries = 16;
/// Unless there are so many with those of heads that share keys.
inline constexpr int few_rows = 64;

/// How a block of the forward kernel is cut: a warpgroup that loads, and `consumers` that have 64 queries
/// each and walk over tiles of keys. It is alone on its multiprocessor.
struct ForwardConfig {
  int dim = 0;           ///< the head dim of queries and keys is filled up to it, in panels of 64
  int dim_v = 0;         ///< that of values
  int consumers = 2;     ///< 2 to 4
  int keys = 0;          ///< a tile
  int stages = 2;        ///< tiles of keys in shared memory, and as many of values
  int query_places = 2;  ///< for a consumer's queries there, which take them in turn
  int turn_stages =
      3;  ///< tiles of queries that are known: one computed, one whose scores start, one to come
  bool staged =
      false;  ///< o leaves through the place of its queries, of which there must be more than consumers
  bool paneled =
      false;           ///< o leaves through two panels of each warp's own, where its queries' place is scarce
  bool trims = false;  ///< where a last tile has 16 keys or fewer, the rest costs no softmax: a class token's
  bool ordered = false;  ///< consumers start the products of a tile of keys one after another
  bool general = false;  ///< for calls with more than scale, causal and window
  bool few = false;      ///< and for few queries: heads in one tile, keys in shares
  bool masked = false;   ///< for calls with a mask, and otherwise no more than the first kind
  bool drops = false;    ///< and for dropout
  TileTime even{};       ///< where all tiles of queries have as many keys
  TileTime uneven{};     ///< where they have not: with causal

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int rows() const { return consumers * 64; }
  constexpr int query_bytes() const { return 64 * dim * 2; }  ///< of a consumer
  constexpr int key_bytes() const { return keys * dim * 2; }
  constexpr int value_bytes() const { return keys * dim_v * 2; }
  /// Whether there are registers for it.
  constexpr bool softcap() const { return general && dim_v <= most_dim_with_softcap; }
  /// Whether queries are let go as soon as they have been read: the next are waited for.
  constexpr bool scarce_queries() const { return !staged && query_places < 2 * consumers; }
  /// Registers of a thread; together they are what a block of one a multiprocessor starts with.
  constexpr int producer_registers() const {
    if (few) return 56;
    return consumers == 4 ? 24 : consumers == 3 ? 32 : 40;
  }
  constexpr int consumer_registers() const {
    if (few) return 224;
    return consumers == 4 ? 112 : consumers == 3 ? 160 : 232;
  }
  /// Where barriers stand: behind queries, keys and values, each of which begins at a multiple of 1024.
  constexpr int tile_bytes() const {
    return query_places * query_bytes() + stages * (key_bytes() + value_bytes()) +
           (paneled ? consumers * output_bytes() : 0) +
           (masked ? consumers * mask_places * mask_place_bytes() : 0);
  }
  /// A consumer's panels of o: two of 16 rows for each of its warps.
  constexpr int output_bytes() const { return 4 * 2 * 16 * 128; }
  /// A consumer's places for a mask: each has a tile of booleans; one of 16 bits takes two, of f32 four.
  static constexpr int mask_places = 4;
  constexpr int mask_place_bytes() const { return 64 * keys; }
  constexpr int barriers() const {
    return 2 * query_places + 4 * stages + 2 * turn_stages + 2 + (masked ? 2 * mask_places * consumers : 0);
  }
  constexpr int barrier_bytes() const {
    return (8 * barriers() + 15) / 16 * 16 + (64 + 32 * consumers) * turn_stages + (ordered ? 16 : 0);
  }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + barrier_bytes());
  }

  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

constexpr ForwardConfig staged(ForwardConfig config) {
  config.staged = true;
  return config;
}
constexpr ForwardConfig ordered(ForwardConfig config) {
  config.ordered = true;
  return config;
}
constexpr ForwardConfig paneled(ForwardConfig config) {
  config.paneled = true;
  return config;
}
constexpr ForwardConfig trimmed(ForwardConfig config) {
  config.trims = true;
  return config;
}
constexpr ForwardConfig timed(ForwardConfig config, TileTime even, TileTime uneven) {
  config.even = even;
  config.uneven = uneven;
  return config;
}

/// One row after another, by dims. Of those with the smallest sufficient dims the one is taken whose tiles
/// take the least time on all multiprocessors. Times are fitted to what was measured of 16k tokens of hidden
/// size 2048; where two rows come out about equal, so that the one is taken that was faster in turns with the
/// other (sweep_wgmma).
struct Forward {
  static constexpr ForwardConfig rows[] = {
      timed(ordered(trimmed(staged(
                {.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 3, .query_places = 6}))),
            {1.46f, 1.430f}, {1.30f, 1.498f}),
      timed(trimmed(
                staged({.dim = 64, .dim_v = 64, .consumers = 4, .keys = 64, .stages = 6, .query_places = 8})),
            {1.75f, 1.020f}, {2.00f, 0.930f}),
      timed(ordered(staged(
                {.dim = 128, .dim_v = 128, .consumers = 3, .keys = 80, .stages = 3, .query_places = 6})),
            {3.25f, 1.200f}, {3.25f, 1.421f}),
      timed(staged({.dim = 128, .dim_v = 128, .consumers = 3, .keys = 64, .stages = 4, .query_places = 6}),
            {2.90f, 1.065f}, {2.08f, 1.210f}),
      timed(ordered(staged(
                {.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .query_places = 4})),
            {1.60f, 1.390f}, {3.10f, 1.647f}),
      {.dim = 192, .dim_v = 128, .consumers = 2, .keys = 112, .stages = 2},
      timed(ordered({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 80, .stages = 2}), {4.40f, 1.595f},
            {5.20f, 1.580f}),
      timed(paneled({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2}), {3.90f, 1.330f},
            {5.00f, 1.300f}),
  };
};

/// The same for calls with softcap, ALiBi, sinks, key lengths or packed sequences. There is one row for each
/// head dim; times are rough, for the comparison with those for few queries.
struct GeneralForward {
  static constexpr ForwardConfig rows[] = {
      timed({.dim = 64,
             .dim_v = 64,
             .consumers = 2,
             .keys = 128,
             .stages = 3,
             .query_places = 4,
             .general = true},
            {1.7f, 1.25f}, {1.7f, 1.25f}),
      timed({.dim = 128,
             .dim_v = 128,
             .consumers = 2,
             .keys = 80,
             .stages = 3,
             .query_places = 4,
             .general = true},
            {2.5f, 1.2f}, {2.5f, 1.2f}),
      timed({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2, .general = true},
            {6.5f, 1.6f}, {6.5f, 1.6f}),
  };
};

/// The same for calls with a mask, and with dropout, of which each has one row for each head dim.
struct MaskedForward {
  static constexpr ForwardConfig rows[] = {
      staged({.dim = 64,
              .dim_v = 64,
              .consumers = 3,
              .keys = 128,
              .stages = 2,
              .query_places = 6,
              .masked = true}),
      {.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .masked = true},
      staged({.dim = 64,
              .dim_v = 64,
              .consumers = 2,
              .keys = 128,
              .stages = 2,
              .query_places = 4,
              .masked = true,
              .drops = true}),
      staged({.dim = 128,
              .dim_v = 128,
              .consumers = 2,
              .keys = 64,
              .stages = 3,
              .query_places = 4,
              .masked = true,
              .drops = true}),
  };
};

/// The same for few queries. (Head dim 256 would spill registers.)
struct FewForward {
  static constexpr ForwardConfig rows[] = {
      timed({.dim = 64, .dim_v = 64, .consumers = 2, .keys = 128, .stages = 4, .general = true, .few = true},
            {3.0f, 1.2f}, {3.0f, 1.2f}),
      timed({.dim = 128, .dim_v = 128, .consumers = 2, .keys = 80, .stages = 4, .general = true, .few = true},
            {3.0f, 1.2f}, {3.0f, 1.2f}),
  };
};

inline constexpr int most_dim_of_few = 128;
/// The most shares that the keys of a tile of queries are cut into: a lane each, where they are joined.
inline constexpr int most_shares = 32;
/// What joining them takes, in microseconds.
inline constexpr float joining_time = 4;

}  // namespace tilewise::cuda::wgmma
