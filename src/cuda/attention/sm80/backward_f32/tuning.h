#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

/// How a block of the backward kernel is cut. It keeps 16 keys a warp and walks over tiles of queries.
struct BackwardConfig {
  int dim = 0;  ///< the head dims, both, are filled up to it
  int warps = 8;
  int dims_at_once = 16;  ///< of a warp, in dk and dv: how many products are under way
  int blocks = 1;         ///< a multiprocessor, at least

  static constexpr int parts = 2;
  static constexpr int row_tiles = 1;
  static constexpr int keys = 32;  ///< a tile, of queries as of keys
  static constexpr int keys_at_once = 32;
  static constexpr int steps_at_once = 2;  ///< of 16 queries in dk and dv, whose small products go first
  constexpr int threads() const { return warps * 32; }
  constexpr int own() const { return warps * 16; }  ///< keys of a block
  constexpr int own_tiles() const { return own() / keys; }
  constexpr int row_bytes() const { return dim * 2; }
  constexpr int part_bytes() const { return keys * row_bytes(); }
  constexpr int tile_bytes() const { return parts * part_bytes(); }
  constexpr int pair_part_bytes() const { return own() * keys * 2; }
  static constexpr int stage_values = 3 * keys + 4;  ///< three numbers a query, and what is known of the tile
  /// Keys and values; two stages of queries, of d_o and of what is known of them; score gradients; two sums a
  /// query of each warp; a factor a tile of keys.
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>((2 * own_tiles() + 4) * tile_bytes() + parts * pair_part_bytes() +
                                    (2 * stage_values + 2 * warps * keys + own_tiles()) * 4);
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim warps dims_at_once blocks", dim, warps, dims_at_once, blocks);
  }
  friend constexpr bool operator==(const BackwardConfig&, const BackwardConfig&) = default;
};

/// One row a line, by head dim. Of those with the smallest sufficient dim the first that fits is taken.
struct FullBackward {
  static constexpr std::string_view name = "attention.sm80.backward_f32";
  static constexpr BackwardConfig rows[] = {
      {.dim = 64, .warps = 4, .blocks = 3},
      {.dim = 128, .warps = 8, .dims_at_once = 32, .blocks = 1},
      {.dim = 128, .warps = 4, .blocks = 1},
  };
};

/// The smallest dim of those rows that is sufficient; 0 where none is.
constexpr int backward_dim(std::int64_t dim) {
  return smallest<FullBackward>([&](const BackwardConfig& c) { return c.dim >= dim; },
                                [](const BackwardConfig& c) { return c.dim; });
}
/// The largest there is.
constexpr int most_backward_dim() { return largest_dim<FullBackward>(); }

static_assert(dims_are_powers_of_two<FullBackward>(),
              "lanes of a row are neighbours that halve what they exchange");

}  // namespace tilewise::cuda::mma_f32
