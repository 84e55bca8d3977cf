#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

/// The tile sizes of the backward kernel. A CTA keeps 16 keys per warp and walks over Q tiles.
struct BackwardConfig {
  int dim = 0;  ///< both head dims are padded to it
  int warps = 8;
  int dims_at_once = 16;  ///< of a warp's accumulators of dK and dV: how many products are in flight
  int blocks = 1;         ///< CTAs per SM, at least

  static constexpr int parts = 2;
  static constexpr int row_tiles = 1;
  static constexpr int keys = 32;  ///< per tile, of queries as of keys
  static constexpr int keys_at_once = 32;
  static constexpr int steps_at_once = 2;  ///< of 16 queries in dK and dV; low parts of all come first
  constexpr int threads() const { return warps * 32; }
  constexpr int cta_keys() const { return warps * 16; }  ///< keys of a CTA
  constexpr int key_tiles() const { return cta_keys() / keys; }
  constexpr int row_bytes() const { return dim * 2; }
  constexpr int part_bytes() const { return keys * row_bytes(); }
  constexpr int tile_bytes() const { return parts * part_bytes(); }
  constexpr int ds_part_bytes() const { return cta_keys() * keys * 2; }
  /// Three numbers per query and three for the tile, padded to 16 bytes.
  static constexpr int stage_row_values = 3 * keys + 4;
  /// K and V; two stages of Q and dO and of their row values; dS; two sums per query and warp; one factor per
  /// K tile.
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>((2 * key_tiles() + 4) * tile_bytes() + parts * ds_part_bytes() +
                                    (2 * stage_row_values + 2 * warps * keys + key_tiles()) * 4);
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim warps dims_at_once blocks", dim, warps, dims_at_once, blocks);
  }
  friend constexpr bool operator==(const BackwardConfig&, const BackwardConfig&) = default;
};

/// Sorted by head dim. Of the rows with the smallest sufficient dim, the first that fits is taken.
struct FullBackward {
  static constexpr std::string_view name = "attention.sm80.backward_f32";
  static constexpr BackwardConfig rows[] = {
      {.dim = 64, .warps = 4, .blocks = 3},
      {.dim = 128, .warps = 8, .dims_at_once = 32, .blocks = 1},
      {.dim = 128, .warps = 4, .blocks = 1},
  };
};

/// The smallest dim of a row that is at least `dim`; 0 where there is none.
constexpr int backward_dim(std::int64_t dim) {
  return smallest<FullBackward>([&](const BackwardConfig& c) { return c.dim >= dim; },
                                [](const BackwardConfig& c) { return c.dim; });
}
/// The largest dim of a row.
constexpr int most_backward_dim() { return largest_dim<FullBackward>(); }

static_assert(dims_are_powers_of_two<FullBackward>(),
              "lanes of a row are neighbours that halve what they exchange");

}  // namespace tilewise::cuda::mma_f32
