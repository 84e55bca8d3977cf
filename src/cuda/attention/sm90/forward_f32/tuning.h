#pragma once

#include <cstddef>

namespace tilewise::cuda::wgmma_f32 {

/// What calls a row of a table is for.
enum class Use {
  any,
  few_uneven,  ///< whose blocks by the row before are all under way at once, and of unlike length: smaller
               ///< ones end together
  few_keys,    ///< four tiles at most: more blocks beside one another hide what is done before and after them
};

/// How a block of the forward kernel is cut: `consumers`, warpgroups of 64 queries each, which walk over all
/// keys at their own pace, and a warp that loads.
struct ForwardConfig {
  int dim = 0;  ///< the head dims, both, are filled up to it
  int parts = 2;
  int consumers = 1;
  int blocks = 2;   ///< a multiprocessor
  int keys = 64;    ///< a tile
  int buffers = 2;  ///< each for a tile of keys or of values

  Use use = Use::any;

  int row_tiles = 1;  ///< of 16 queries, a warp

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int warp_rows() const { return 16; }
  constexpr int rows() const { return consumers * 64; }
  constexpr int query_part_bytes() const { return rows() * dim * 2; }
  constexpr int key_part_bytes() const { return keys * dim * 2; }
  constexpr int key_bytes() const { return parts * key_part_bytes(); }  ///< of a buffer
  /// Registers of a thread: the same for all at the start, then what the warp that loads gives back is the
  /// consumers'.
  constexpr int first_registers() const { return 65536 / (threads() * blocks) / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return (first_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
  /// Queries, the buffers, queries' exponents, barriers, and what rows the block has.
  static constexpr int rows_bytes = 128;
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(parts * query_part_bytes() + buffers * key_bytes() + rows() * 4 +
                                    16 * buffers + rows_bytes);
  }
  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

// One row a line. Of those with a call's head dim the last is taken that is for it.

/// Two parts a number: f32's own error.
struct FullForward {
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .parts = 2, .buffers = 5},
      {.dim = 64, .parts = 2, .blocks = 3, .buffers = 3, .use = Use::few_keys},
      {.dim = 128, .parts = 2, .consumers = 2, .blocks = 1, .buffers = 5},
  };
};
/// One part, where the caller allowed TF32: f16 has as many digits.
struct Tf32Forward {
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .parts = 1, .consumers = 2, .buffers = 8},
      {.dim = 128, .parts = 1, .buffers = 5},
      {.dim = 64, .parts = 1, .blocks = 3, .buffers = 6, .use = Use::few_uneven},
  };
};

/// Tiles of all rows have as many keys: they are split before.
inline constexpr int tile_keys = 64;
/// The largest head dim there is a row for.
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_f32
