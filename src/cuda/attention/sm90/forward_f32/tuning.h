#pragma once

#include <cstddef>
#include <string_view>

namespace tilewise::cuda::wgmma_f32 {

/// The calls that a row of a table is for.
enum class Use {
  any,
  /// Calls with CTAs of unequal length that all run at once with the first row: smaller CTAs balance the
  /// load.
  few_uneven,
  few_keys,  ///< four K tiles at most: more CTAs on an SM hide prologue and epilogue
};

/// The shape of a CTA of the forward kernel: `consumers` warpgroups of 64 query rows each, which walk over
/// all keys at their own pace, and a warp that loads.
struct ForwardConfig {
  int dim = 0;  ///< both head dims are padded to it
  int parts = 2;
  int consumers = 1;
  int blocks = 2;   ///< CTAs per SM
  int keys = 64;    ///< keys of a K tile
  int buffers = 2;  ///< stages, each for a K tile or a V tile

  Use use = Use::any;

  int row_tiles = 1;  ///< tiles of 16 rows per warp

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int warp_rows() const { return 16; }
  constexpr int rows() const { return consumers * 64; }
  constexpr int query_part_bytes() const { return rows() * dim * 2; }
  constexpr int key_part_bytes() const { return keys * dim * 2; }
  constexpr int key_bytes() const { return parts * key_part_bytes(); }  ///< bytes of a stage
  /// Registers per thread. All threads start with the same number; then consumers take what the producer
  /// warpgroup gives up.
  constexpr int first_registers() const { return 65536 / (threads() * blocks) / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return (first_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8;
  }
  /// Bytes of the QueryRows in shared memory, after Q, the stages, the exponents of Q and the mbarriers.
  static constexpr int rows_bytes = 128;
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(parts * query_part_bytes() + buffers * key_bytes() + rows() * 4 +
                                    16 * buffers + rows_bytes);
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim parts consumers blocks keys buffers", dim, parts, consumers, blocks, keys, buffers);
  }
  friend constexpr bool operator==(const ForwardConfig&, const ForwardConfig&) = default;
};

// A call gets the last row that has its head dim and is for the call.

/// Two parts for each number: the error of f32.
struct FullForward {
  static constexpr std::string_view name = "attention.sm90.forward_f32";
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .parts = 2, .buffers = 5},
      {.dim = 64, .parts = 2, .blocks = 3, .buffers = 3, .use = Use::few_keys},
      {.dim = 128, .parts = 2, .consumers = 2, .blocks = 1, .buffers = 5},
  };
};
/// One part, for callers that allow TF32, which has as many mantissa bits as f16.
struct Tf32Forward {
  static constexpr std::string_view name = "attention.sm90.forward_tf32";
  static constexpr ForwardConfig rows[] = {
      {.dim = 64, .parts = 1, .consumers = 2, .buffers = 8},
      {.dim = 128, .parts = 1, .buffers = 5},
      {.dim = 64, .parts = 1, .blocks = 3, .buffers = 6, .use = Use::few_uneven},
  };
};

/// K tiles of all rows have the same size, which the split of K and V into parts depends on.
inline constexpr int tile_keys = 64;
/// The largest head dim that has a row.
inline constexpr int most_dim = 128;

}  // namespace tilewise::cuda::wgmma_f32
