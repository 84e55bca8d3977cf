#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace tilewise::cuda::wgmma {

/// The largest head dims that the tables below have rows for.
inline constexpr int most_dim = 256;
inline constexpr int most_dim_with_softcap = 128;
inline constexpr int most_dim_with_blocks_and_dropout = 128;
inline constexpr int most_dim_with_mask = 128;    // of MaskedForward; CombinedForward has the others
inline constexpr int most_dim_with_padding = 64;  // likewise, beside a mask

/// Microseconds that a Q tile takes on an H200: `start`, and `step` for each of its K tiles.
struct TileTime {
  float start = 1;
  float step = 1;
  friend constexpr bool operator==(const TileTime&, const TileTime&) = default;
};

/// Up to this number of queries `mma` is faster. Measured on an H200 with 32 heads over 8 KV heads and batch
/// 64: by a factor of 2 with one query, by 1.1 with 16 queries; with 64 queries it takes 1.4 times as long.
inline constexpr int few_queries = 16;
/// But not from this number of rows on, counting those of all heads that share a KV head.
inline constexpr int few_rows = 64;

/// The shape of a CTA of the forward kernel: a producer warpgroup that loads, and `consumers` warpgroups that
/// own 64 query rows each and walk over K tiles. There is one CTA per SM.
struct ForwardConfig {
  int dim = 0;           ///< the head dim of Q and K is padded to it; a multiple of 64
  int dim_v = 0;         ///< the same for V
  int consumers = 2;     ///< 2 to 4
  int keys = 0;          ///< keys of a K tile
  int stages = 2;        ///< stages of K in shared memory, and as many of V
  int q_stages = 2;      ///< stages of Q, each of 64 rows; consumers use them round robin
  int work_stages = 3;   ///< published work items: one computed, one whose S starts, and the next
  bool staged = false;   ///< O is stored through the stage of its Q; needs more Q stages than consumers
  bool paneled = false;  ///< O is stored through two panels of each warp's own, where Q stages are scarce
  bool trims = false;    ///< a last K tile of 16 keys or fewer, as with a class token, costs no more softmax
  bool ordered = false;  ///< consumers start the products of a K tile one after another
  bool general = false;  ///< for calls with more features than scale, causal and window
  bool decode = false;   ///< also for decoding: packed GQA and split-KV
  bool masked = false;   ///< for calls with a mask; if not `general`, only with scale, causal and window
  bool drops = false;    ///< for calls with dropout
  bool pads = false;     ///< for calls with padding beside a mask, which rows for all combinations take, too
  bool blocks = false;   ///< for calls with a block mask; if not `general`, restricted like `masked`
  /// Stages per consumer for tiles of a mask. A tile of booleans takes one, of 16-bit elements two, of f32
  /// four.
  int mask_stages = 4;
  TileTime even{};    ///< if all Q tiles see equally many keys
  TileTime uneven{};  ///< if they do not, as with causal

  constexpr int threads() const { return (consumers + 1) * 128; }
  constexpr int rows() const { return consumers * 64; }
  constexpr int query_bytes() const { return 64 * dim * 2; }  ///< bytes of a Q stage
  constexpr int key_bytes() const { return keys * dim * 2; }
  constexpr int value_bytes() const { return keys * dim_v * 2; }
  /// Whether the row takes calls with a mask or dropout together with any other feature.
  constexpr bool combined() const { return general && masked; }
  constexpr bool may_pad() const { return pads || combined(); }
  /// Whether a mask may come together with softcap and ALiBi, after which it is applied.
  constexpr bool masks_last() const { return general && mask_tiles(); }
  /// Whether the row takes calls with and without dropout.
  constexpr bool may_drop() const { return general && drops; }
  /// Whether there are registers for softcap.
  constexpr bool softcap() const { return general && dim_v <= most_dim_with_softcap; }
  /// Whether Q is released as soon as it has been read, because the next Q waits for its stage.
  constexpr bool scarce_queries() const { return !staged && q_stages < 2 * consumers; }
  /// Registers per thread after setmaxnreg. All threads together have those that the CTA is launched with.
  constexpr int producer_registers() const {
    if (blocks && may_drop()) return 72;
    if (decode || blocks) return 56;
    return consumers == 4 ? 24 : consumers == 3 ? 32 : 40;
  }
  constexpr int consumer_registers() const {
    if (blocks && may_drop()) return 216;
    if (decode || blocks) return 224;
    return consumers == 4 ? 112 : consumers == 3 ? 160 : 232;
  }
  /// Offset of the mbarriers, behind the tiles, each of which starts at a multiple of 1024 bytes.
  constexpr int tile_bytes() const {
    return q_stages * query_bytes() + stages * (key_bytes() + value_bytes()) +
           (paneled ? consumers * output_bytes() : 0) + (mask_tiles() ? consumers * mask_bytes() : 0);
  }
  /// A consumer's panels of O: two of 16 rows for each of its warps.
  constexpr int output_bytes() const { return 4 * 2 * 16 * 128; }
  /// Whether consumers have stages for tiles of a mask.
  constexpr bool mask_tiles() const { return masked || blocks; }
  constexpr int mask_stage_bytes() const { return 64 * keys; }
  /// A consumer's stages, and behind them room for 16 more bytes of each row of an f32 mask (odd_mask.cuh).
  constexpr int mask_bytes() const { return mask_stages * mask_stage_bytes() + (combined() ? 64 * 16 : 0); }
  constexpr int barriers() const {
    return 2 * q_stages + 4 * stages + 2 * work_stages + 2 +
           (mask_tiles() ? 2 * mask_stages * consumers : 0) + (may_pad() ? work_stages : 0);
  }
  constexpr int barrier_bytes() const {
    return (8 * barriers() + 15) / 16 * 16 + (64 + 32 * consumers) * work_stages + (ordered ? 16 : 0) +
           (blocks ? 16 : 0);
  }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + barrier_bytes());
  }

  template <typename To>
  constexpr void describe(To& to) const {
    to.number("dim", dim);
    to.number("dim_v", dim_v);
    to.number("consumers", consumers);
    to.number("keys", keys);
    to.number("stages", stages);
    to.number("q_stages", q_stages);
    to.word(staged ? "staged" : "");
    to.word(paneled ? "paneled" : "");
    to.word(trims ? "trims" : "");
    to.word(ordered ? "ordered" : "");
    to.word(drops ? "drops" : "");
    to.word(pads ? "pads" : "");
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

/// Rows in order of their dims. Among the rows with the smallest sufficient dims, a call gets the one whose
/// tiles take the least time on all SMs. Times are fitted to measurements of 16k tokens of hidden size 2048.
/// Where two rows are about equal, times are set so that the faster one of an interleaved run is chosen
/// (sweep_wgmma).
struct Forward {
  static constexpr std::string_view name = "attention.sm90.forward";
  static constexpr ForwardConfig rows[] = {
      timed(ordered(trimmed(
                staged({.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 3, .q_stages = 6}))),
            {1.46f, 1.430f}, {1.30f, 1.498f}),
      timed(trimmed(staged({.dim = 64, .dim_v = 64, .consumers = 4, .keys = 64, .stages = 6, .q_stages = 8})),
            {1.75f, 1.020f}, {2.00f, 0.930f}),
      timed(
          ordered(staged({.dim = 128, .dim_v = 128, .consumers = 3, .keys = 80, .stages = 3, .q_stages = 6})),
          {3.25f, 1.200f}, {3.25f, 1.421f}),
      timed(staged({.dim = 128, .dim_v = 128, .consumers = 3, .keys = 64, .stages = 4, .q_stages = 6}),
            {2.90f, 1.065f}, {2.08f, 1.210f}),
      timed(ordered(
                staged({.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 4})),
            {1.60f, 1.390f}, {3.10f, 1.647f}),
      {.dim = 192, .dim_v = 128, .consumers = 2, .keys = 112, .stages = 2},
      timed(ordered({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 80, .stages = 2}), {4.40f, 1.595f},
            {5.20f, 1.580f}),
      timed(paneled({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2}), {3.90f, 1.330f},
            {5.00f, 1.300f}),
  };
};

/// For calls with softcap, ALiBi, sinks, key lengths or packed sequences. There is one row for each head dim.
/// Times are rough; they serve the comparison with DecodeForward.
struct GeneralForward {
  static constexpr std::string_view name = "attention.sm90.forward_general";
  static constexpr ForwardConfig rows[] = {
      timed(
          {.dim = 64, .dim_v = 64, .consumers = 2, .keys = 128, .stages = 3, .q_stages = 4, .general = true},
          {1.7f, 1.25f}, {1.7f, 1.25f}),
      timed(
          {.dim = 128, .dim_v = 128, .consumers = 2, .keys = 80, .stages = 3, .q_stages = 4, .general = true},
          {2.5f, 1.2f}, {2.5f, 1.2f}),
      timed({.dim = 256, .dim_v = 256, .consumers = 2, .keys = 64, .stages = 2, .general = true},
            {6.5f, 1.6f}, {6.5f, 1.6f}),
  };
};

/// For calls with a mask and calls with dropout; each has one row for each head dim. For a mask with padding
/// beside it, as protein models have it with head dim 32, there is a row of its own.
struct MaskedForward {
  static constexpr std::string_view name = "attention.sm90.forward_masked";
  static constexpr ForwardConfig rows[] = {
      staged(
          {.dim = 64, .dim_v = 64, .consumers = 3, .keys = 128, .stages = 2, .q_stages = 6, .masked = true}),
      {.dim = 128, .dim_v = 128, .consumers = 2, .keys = 128, .stages = 2, .masked = true},
      staged({.dim = most_dim_with_padding,
              .dim_v = most_dim_with_padding,
              .consumers = 2,
              .keys = 128,
              .stages = 2,
              .q_stages = 4,
              .masked = true,
              .pads = true,
              .mask_stages = 8}),
      staged({.dim = 64,
              .dim_v = 64,
              .consumers = 2,
              .keys = 128,
              .stages = 2,
              .q_stages = 4,
              .masked = true,
              .drops = true}),
      staged({.dim = 128,
              .dim_v = 128,
              .consumers = 2,
              .keys = 64,
              .stages = 3,
              .q_stages = 4,
              .masked = true,
              .drops = true}),
  };
};

/// For calls with a mask or dropout that MaskedForward has no row for: with softcap, ALiBi, sinks, a logit
/// scale, key lengths or packed sequences, with head dims above 128, and masks whose rows start anywhere.
/// One row for each head dim takes all of these, masks with and without dropout.
struct CombinedForward {
  static constexpr std::string_view name = "attention.sm90.forward_combined";
  static constexpr ForwardConfig rows[] = {
      {.dim = 64,
       .dim_v = 64,
       .consumers = 2,
       .keys = 128,
       .stages = 2,
       .q_stages = 4,
       .general = true,
       .masked = true,
       .drops = true,
       .mask_stages = 8},
      {.dim = 128,
       .dim_v = 128,
       .consumers = 2,
       .keys = 64,
       .stages = 3,
       .q_stages = 4,
       .general = true,
       .masked = true,
       .drops = true,
       .mask_stages = 8},
      {.dim = 256,
       .dim_v = 256,
       .consumers = 2,
       .keys = 64,
       .stages = 2,
       .general = true,
       .masked = true,
       .drops = true},
  };
};

/// For calls with a block mask, one row for each head dim. A Q tile is inside one row of query blocks and a K
/// tile inside one key block, since both divide `block_multiple`.
struct BlockForward {
  static constexpr std::string_view name = "attention.sm90.forward_blocks";
  static constexpr ForwardConfig rows[] = {
      ordered(staged({.dim = 64,
                      .dim_v = 64,
                      .consumers = 2,
                      .keys = 128,
                      .stages = 3,
                      .q_stages = 4,
                      .blocks = true,
                      .mask_stages = 2})),
      ordered(staged({.dim = 128,
                      .dim_v = 128,
                      .consumers = 2,
                      .keys = 128,
                      .stages = 2,
                      .q_stages = 4,
                      .blocks = true,
                      .mask_stages = 2})),
      ordered({.dim = 256,
               .dim_v = 256,
               .consumers = 2,
               .keys = 64,
               .stages = 2,
               .blocks = true,
               .mask_stages = 2}),
  };
};
/// For calls with a block mask together with softcap, ALiBi, sinks, a logit scale, key lengths or dropout.
/// (Dropout with head dim 256 would spill registers.)
struct GeneralBlockForward {
  static constexpr std::string_view name = "attention.sm90.forward_general_blocks";
  static constexpr ForwardConfig rows[] = {
      {.dim = 64,
       .dim_v = 64,
       .consumers = 2,
       .keys = 128,
       .stages = 3,
       .q_stages = 4,
       .general = true,
       .drops = true,
       .blocks = true,
       .mask_stages = 2},
      {.dim = 128,
       .dim_v = 128,
       .consumers = 2,
       .keys = 64,
       .stages = 3,
       .q_stages = 4,
       .general = true,
       .drops = true,
       .blocks = true,
       .mask_stages = 2},
      {.dim = 256,
       .dim_v = 256,
       .consumers = 2,
       .keys = 64,
       .stages = 2,
       .general = true,
       .blocks = true,
       .mask_stages = 2},
  };
};
/// Blocks have a multiple of this number of queries and keys, or all queries or keys.
inline constexpr int block_multiple = 128;

/// For decoding. (Head dim 256 would spill registers.)
struct DecodeForward {
  static constexpr std::string_view name = "attention.sm90.decode";
  static constexpr ForwardConfig rows[] = {
      timed(
          {.dim = 64, .dim_v = 64, .consumers = 2, .keys = 128, .stages = 4, .general = true, .decode = true},
          {3.0f, 1.2f}, {3.0f, 1.2f}),
      timed({.dim = 128,
             .dim_v = 128,
             .consumers = 2,
             .keys = 80,
             .stages = 4,
             .general = true,
             .decode = true},
            {3.0f, 1.2f}, {3.0f, 1.2f}),
  };
};

inline constexpr int most_dim_of_decode = 128;
/// The most splits of the keys of a Q tile: combine_splits_kernel has a lane for each.
inline constexpr int most_splits = 32;
/// The time of the combine step, in microseconds.
inline constexpr float combine_time = 4;

}  // namespace tilewise::cuda::wgmma
