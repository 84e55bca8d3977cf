#pragma once

#include <cstddef>

#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

/// The tile sizes of the forward kernel. A warp has 16 · row_tiles queries of its own and walks over all
/// keys. Every fragment of K and V that it loads serves all its row tiles.
struct ForwardConfig {
  int dim = 0;  ///< both head dims are padded to it
  int warps = 4;
  int row_tiles = 2;          ///< of 16 queries, per warp
  int keys = 32;              ///< per tile
  int parts = 2;              ///< 16-bit numbers that an f32 number is split into
  int keys_at_once = 32;      ///< of a tile, in Q·Kᵀ: how many products are in flight
  int dims_at_once = 16;      ///< the same for the dims of P·V
  int buffers = 3;            ///< each holds a K tile or a V tile
  bool queries_stay = false;  ///< in registers; otherwise they are loaded again for every K tile
  int blocks = 1;             ///< CTAs per SM, at least

  static constexpr int steps_at_once = 1;  ///< of 16 keys in P·V, whose products of low parts come first
  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int rows() const { return warps * warp_rows(); }
  constexpr int row_bytes() const { return dim * 2; }  ///< of one part
  constexpr int query_part_bytes() const { return rows() * row_bytes(); }
  constexpr int key_part_bytes() const { return keys * row_bytes(); }
  constexpr int key_bytes() const { return parts * key_part_bytes(); }  ///< of a buffer
  /// Q and its exponents, then the buffers.
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(parts * query_part_bytes() + buffers * key_bytes() + rows() * 4);
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim warps row_tiles keys parts keys_at_once dims_at_once buffers blocks", dim, warps,
               row_tiles, keys, parts, keys_at_once, dims_at_once, buffers, blocks);
    to.words("queries_stay", queries_stay);
  }
  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

// Of the rows with the smallest sufficient dim, the first whose CTAs fill most of the GPU is taken, or else
// the last that fits into its shared memory. Rows of a table have the same K tiles, because these are split
// before the row's kernel starts. bench/sweep_mma_f32.cu measures candidates.

/// Two parts per number: as exact as f32.
struct FullForward {
  static constexpr std::string_view name = "attention.sm80.forward_f32";
  static constexpr int keys = 32;
  static constexpr int parts = 2;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64,
       .warps = 4,
       .row_tiles = 2,
       .keys_at_once = 16,
       .buffers = 4,
       .queries_stay = true,
       .blocks = 2},
      {.dim = 64, .warps = 4, .row_tiles = 1, .buffers = 4, .blocks = 3},
      {.dim = 128, .warps = 4, .row_tiles = 2, .dims_at_once = 32, .buffers = 3, .blocks = 2},
      {.dim = 128, .warps = 4, .row_tiles = 1, .buffers = 3, .blocks = 2},
      {.dim = 256, .warps = 8, .row_tiles = 1, .dims_at_once = 32, .buffers = 3, .blocks = 1},
      {.dim = 256, .warps = 4, .row_tiles = 1, .buffers = 3, .blocks = 1},
  };
};

/// One part per number, where the caller allowed TF32: f16 has as many digits.
constexpr ForwardConfig tf32(ForwardConfig c) {
  c.keys = 64;
  c.parts = 1;
  c.dims_at_once = 32;
  return c;
}
struct Tf32Forward {
  static constexpr std::string_view name = "attention.sm80.forward_tf32";
  static constexpr int keys = 64;
  static constexpr int parts = 1;
  static constexpr ForwardConfig rows[] = {
      tf32({.dim = 64, .warps = 4, .row_tiles = 2, .buffers = 4, .queries_stay = true, .blocks = 2}),
      tf32({.dim = 64, .warps = 4, .row_tiles = 1, .buffers = 4, .blocks = 3}),
      tf32({.dim = 128, .warps = 4, .row_tiles = 2, .buffers = 4, .blocks = 2}),
      tf32({.dim = 128, .warps = 4, .row_tiles = 1, .buffers = 3, .blocks = 2}),
      tf32({.dim = 256, .warps = 8, .row_tiles = 1, .buffers = 4, .blocks = 1}),
      tf32({.dim = 256, .warps = 4, .row_tiles = 1, .buffers = 3, .blocks = 1}),
  };
};

/// The largest head dim that has a row.
inline constexpr int most_dim = 256;

static_assert(dims_are_powers_of_two<FullForward>() && dims_are_powers_of_two<Tf32Forward>(),
              "lanes of a row are neighbours that halve what they exchange");
static_assert(largest_dim<FullForward>() == most_dim && largest_dim<Tf32Forward>() == most_dim,
              "table_dim() begins at most_dim, whichever table a call takes");

}  // namespace tilewise::cuda::mma_f32
