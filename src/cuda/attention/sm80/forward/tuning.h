#pragma once

#include <cstddef>

#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma {

/// The tile sizes of the forward kernel. A warp, or a pair of warps, has 16 · row_tiles queries of its own
/// and walks over all keys. Every fragment of K and V that it loads serves all its row tiles.
struct ForwardConfig {
  int dim = 0;  ///< both head dims are padded to it
  int warps = 4;
  int row_tiles = 1;          ///< of 16 queries, per warp
  int keys = 64;              ///< per tile
  bool queries_stay = false;  ///< in registers; otherwise they are loaded again for every K tile
  int stages = 2;             ///< of K and V; pairs have one, where V is loaded during Q·Kᵀ and K during P·V
  bool paired = false;        ///< two warps share their queries; each has half of the keys and half of O
  bool old_maxima = false;  ///< P is computed with the maxima so far, and again where an element is too large
  int blocks = 1;           ///< CTAs per SM, at least
  bool split_kv = false;    ///< several CTAs may share the keys of a Q tile, see split_kv.h
  bool additive = true;     ///< takes additive masks; without them more registers are left for scores

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int rows() const { return warps * warp_rows() / (paired ? 2 : 1); }
  constexpr int row_bytes() const { return dim * 2; }
  constexpr int query_bytes() const { return rows() * row_bytes(); }
  constexpr int key_bytes() const { return keys * row_bytes(); }   ///< one stage of K or V
  constexpr int pair_p_bytes() const { return threads() * keys; }  ///< P that paired warps exchange
  static constexpr int fact_bytes = 384;                           ///< of ForwardFacts
  /// Q, stages of K and V; for pairs P and two floats per thread.
  constexpr std::size_t shared_bytes(bool general) const {
    return static_cast<std::size_t>(query_bytes() + 2 * stages * key_bytes() + (general ? fact_bytes : 0) +
                                    (paired ? pair_p_bytes() + threads() * 8 : 0));
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim warps row_tiles keys stages blocks", dim, warps, row_tiles, keys, stages, blocks);
    to.words("queries_stay paired old_maxima in_parts not_additive", queries_stay, paired, old_maxima,
             split_kv, !additive);  // "in_parts" is what tuning files call it
  }
  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

// Of the rows with the smallest sufficient dim, the first whose CTAs fill most of the GPU is taken, or else
// the last that fits into its shared memory. Rows of one warp are for heads, or groups of heads, whose
// queries fit into its 16 rows. That is decoding, which is bound by reading the keys, so as many CTAs as
// possible should read. bench/sweep_mma.cu measures candidates.

// Rows of both tables.
inline constexpr ForwardConfig small64{
    .dim = 64, .row_tiles = 1, .keys = 64, .queries_stay = true, .blocks = 3, .split_kv = true};
inline constexpr ForwardConfig one_warp64{
    .dim = 64, .warps = 1, .row_tiles = 1, .keys = 64, .queries_stay = true, .blocks = 6, .split_kv = true};
constexpr ForwardConfig one_warp(int dim, int blocks) {
  return {.dim = dim, .warps = 1, .row_tiles = 1, .keys = 32, .blocks = blocks, .split_kv = true};
}

/// For calls in which only the band hides keys, with aligned rows.
struct PlainForward {
  static constexpr std::string_view name = "attention.sm80.forward";
  static constexpr bool general = false;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 64, .queries_stay = true, .blocks = 2},
      small64,
      {.dim = 96, .warps = 4, .row_tiles = 2, .keys = 64, .blocks = 2},
      {.dim = 128, .warps = 4, .row_tiles = 2, .keys = 64, .old_maxima = true, .blocks = 2},
      {.dim = 128, .warps = 4, .row_tiles = 1, .keys = 32, .blocks = 2, .split_kv = true},
      {.dim = 192, .warps = 8, .row_tiles = 1, .keys = 64, .blocks = 1},
      {.dim = 256, .warps = 4, .row_tiles = 2, .keys = 64, .stages = 1, .paired = true, .blocks = 2},
      {.dim = 256, .warps = 8, .row_tiles = 1, .keys = 32, .blocks = 1},
      {.dim = 256, .warps = 4, .row_tiles = 1, .keys = 32, .blocks = 1, .split_kv = true},
      one_warp64,
      one_warp(128, 6),
      one_warp(256, 3),
  };
};

/// For all other calls.
struct GeneralForward {
  static constexpr std::string_view name = "attention.sm80.forward_general";
  static constexpr bool general = true;
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .warps = 4, .row_tiles = 2, .keys = 64, .blocks = 2, .additive = false},
      small64,
      {.dim = 128, .warps = 4, .row_tiles = 1, .keys = 64, .blocks = 2, .split_kv = true},
      {.dim = 256, .warps = 4, .row_tiles = 1, .keys = 32, .blocks = 1, .split_kv = true},
      {.dim = 256, .warps = 4, .row_tiles = 1, .keys = 16, .blocks = 1, .split_kv = true},
      one_warp64,
      one_warp(128, 6),
      one_warp(256, 3),
  };
};

/// The largest head dim that has a row.
inline constexpr int most_dim = 256;

template <typename Table>
constexpr bool forward_dims_rise() {
  return dims_rise<Table>([](const ForwardConfig& c) { return c.warps == 1; }) &&
         dims_rise<Table>([](const ForwardConfig& c) { return c.warps != 1; });
}
static_assert(forward_dims_rise<PlainForward>() && forward_dims_rise<GeneralForward>(),
              "choose_row() takes the first dim that is sufficient, of rows of one warp and of the others");
static_assert(dims_are_powers_of_two<GeneralForward>(), "load_strided_keys() has a thread for every chunk");
static_assert(largest_dim<PlainForward>() == most_dim && largest_dim<GeneralForward>() == most_dim,
              "supports() goes by most_dim, whichever table a call takes");

}  // namespace tilewise::cuda::mma
