#pragma once

#include <algorithm>
#include <cstddef>

namespace tilewise::cuda::wgmma_backward {

/// The shape of a CTA. It keeps some keys and walks over tiles of queries, which the producer warps load by
/// TMA.
///
/// Up to dim 128 each of two consumer warpgroups has 64 of 128 keys. Above (`wide`), dK and dV of 64 keys
/// would not fit into a warpgroup's registers, so both consumers have the same 64 keys. They split S and dP
/// by queries, and dK, dV and dQ by dims; P and dS pass through shared memory.
struct Config {
  int dim = 0;           ///< head dim of Q and K, which are padded to it
  int dim_v = 0;         ///< head dim of V and dO, padded in the same way
  int queries = 0;       ///< queries of a tile: 64, or 128 at dim 64
  bool general = false;  ///< takes softcap, ALiBi, masks and dropout; plain rows take sinks and padding
  bool listed = false;   ///< takes block masks, by lists of query blocks
  bool drops = false;    ///< plain, with dropout
  int keys = 128;
  int q_stages = 2;
  int d_o_stages = 2;
  bool turns = false;  ///< only one consumer at a time computes P
  /// Plain: the accumulator of S starts as −LSE, which takes fewer registers than adding LSE afterwards.
  bool preload = false;
  int producer_warps = 4;              ///< where there may be dropout: 8, of which four draw it
  int producer_registers = 24;         ///< of a thread
  int draws_at_once = 1;               ///< independent draws of a thread, which hide each other's latency
  static constexpr int ds_stages = 2;  ///< stages of dS, and of P where it passes through shared memory
  static constexpr int consumers = 2;
  static constexpr int consumer_warps = 4 * consumers;
  static constexpr int consumer_threads = 128 * consumers;
  constexpr int threads() const { return consumer_threads + 32 * producer_warps; }
  constexpr bool may_drop() const { return general || drops; }
  /// The last producer warps draw dropout's random numbers.
  constexpr int dropout_warps() const { return producer_warps / 2; }
  static constexpr int mask_warp = 3;  ///< the producer warp that loads masks and block masks' bits
  /// Whether the producer publishes each tile in shared memory, rather than each consumer walking by itself.
  constexpr bool published() const { return general || listed; }
  /// All threads of a CTA start with the same number of registers. Then consumers take what the producers
  /// give up.
  constexpr int consumer_registers() const {
    const int at_first = 65536 / threads() / 8 * 8;
    return (at_first * threads() - 32 * producer_warps * producer_registers) / consumer_threads / 8 * 8;
  }

  constexpr bool operator==(const Config&) const = default;
  constexpr bool wide() const { return dim > 128; }
  constexpr int own_queries() const {
    return wide() ? queries / 2 : queries;
  }  ///< queries of a consumer's S and dP

  // Shared memory has panels of 64 dims. Products skip the dims of the last panel past the head dim.
  constexpr int panels() const { return (dim + 63) / 64; }
  constexpr int panels_v() const { return (dim_v + 63) / 64; }

  /// The panels of dK and dV that a consumer has, where consumers split them (`wide`). Of three panels, one
  /// consumer has two of dK, and the other one two of dV.
  constexpr int first_dk_panel(int consumer) const { return consumer * (panels() + 1) / 2; }
  constexpr int dk_panels(int consumer) const {
    return consumer == 0 ? first_dk_panel(1) : panels() - first_dk_panel(1);
  }
  constexpr int first_dv_panel(int consumer) const { return consumer * panels_v() / 2; }
  constexpr int dv_panels(int consumer) const {
    return consumer == 0 ? first_dv_panel(1) : panels_v() - first_dv_panel(1);
  }
  constexpr int own_dk_dims(int consumer) const { return wide() ? 64 * dk_panels(consumer) : dim; }
  constexpr int own_dv_dims(int consumer) const { return wide() ? 64 * dv_panels(consumer) : dim_v; }
  /// The panels of dQ that a consumer has: the consumer with less of dK has more of dQ.
  constexpr int first_dq_panel(int consumer) const { return consumer * panels() / 2; }
  constexpr int dq_panels(int consumer) const {
    return consumer == 0 ? first_dq_panel(1) : panels() - first_dq_panel(1);
  }
  /// The panels of dQ that a consumer computes at once. At dim 256 it has registers and shared memory for
  /// one.
  constexpr int dq_panels_at_once(int consumer) const { return dim == 192 ? dq_panels(consumer) : 1; }
  constexpr int dq_buffers() const { return wide() ? dq_panels_at_once(0) + dq_panels_at_once(1) : 2; }
  /// Whether both consumers have equal shares.
  constexpr bool even() const { return panels() % 2 == 0 && panels_v() % 2 == 0; }

  /// How consumers split dQ. From dim 96 on each has half of the panels; at dim 64 each has half of the
  /// queries.
  constexpr bool dq_by_queries() const { return dim == 64; }
  // The f32 sums of a tile's dQ are [dq_halves, dim / 16, queries of a half / 8, 128]. dQ is computed
  // transposed, 64 dims at once, of which a warp has 16.
  constexpr int dq_queries() const { return queries / dq_halves(); }
  constexpr int warp_dq_floats() const { return 16 * dq_queries(); }
  constexpr int dq_halves() const { return dq_by_queries() ? 2 : 1; }
  /// Index of the first sum of a half of the queries and of 16 dims, number `chunk`.
  constexpr int dq_offset(int half, int chunk) const {
    return (half * (dim / 16) + chunk) * warp_dq_floats();
  }
  /// Whether dQ is computed one tile later, so that no consumer waits for the other one's dS of the same
  /// tile: where each consumer has keys of its own.
  constexpr bool lagged() const { return !wide(); }
  /// Whether dP is computed after P, together with dV: the score rules leave no registers for it.
  constexpr bool late_dp() const { return general && !wide() && dim > 64; }
  /// The number of parts of a tile's dQ that are added separately.
  constexpr int dq_chunks() const { return dim / 16 * dq_halves(); }

  constexpr int k_bytes() const { return keys * panels() * 128; }
  constexpr int v_bytes() const { return keys * panels_v() * 128; }
  constexpr int q_bytes() const { return queries * panels() * 128; }      ///< a stage of Q
  constexpr int d_o_bytes() const { return queries * panels_v() * 128; }  ///< a stage of dO
  constexpr int ds_bytes() const { return keys * queries * 2; }           ///< a stage of dS, or of P
  constexpr int kept_words() const { return keys / 32; }  ///< words of a query with one bit per key
  constexpr int kept_bytes() const { return kept_words() * queries * 4; }
  /// Values per row of queries: LSE, delta, and the general kernel's offset.
  constexpr int row_values() const { return general ? 3 : 2; }
  constexpr int barriers() const {
    return 2 * (q_stages + d_o_stages) + 5 + (published() ? 2 * most_mask_stages : 0) + (may_drop() ? 4 : 0) +
           (lagged() ? 4 : 0);
  }
  /// The most stages of a mask and of a block mask's bits. A call may have room for fewer (stages_of).
  static constexpr int most_mask_stages = 2;
  static constexpr int step_bytes = 32;  ///< at least the size of a Step and a Visible
  static constexpr int word_bytes = 40;  ///< the size of Words
  /// Bytes of row values, barriers, Words and Steps, rounded up to the alignment of the mask behind them.
  constexpr int value_bytes() const {
    return (row_values() * q_stages * queries * 4 + barriers() * 8 + word_bytes +
            (published() ? 2 * step_bytes : 0) + 1023) /
           1024 * 1024;
  }
  constexpr int seen_bytes() const { return listed ? kept_bytes() : 0; }  ///< a stage of a block mask's bits
  /// Bytes of a stage of the mask, which TMA copies in boxes of 128 bytes per row: 128 keys of a boolean
  /// mask.
  constexpr int mask_bytes(int element_bytes) const {
    return queries * (keys * element_bytes < 128 ? 128 : keys * element_bytes);
  }

  /// The general kernel's `mask`, the bytes of all its stages, and `kept_stages` depend on the call.
  constexpr std::size_t shared_bytes(int mask = 0, int kept_stages = 0) const {
    return static_cast<std::size_t>(k_bytes() + v_bytes() + q_stages * q_bytes() + d_o_stages * d_o_bytes() +
                                    (wide() ? 2 : 1) * ds_stages * ds_bytes() +
                                    dq_buffers() * 4 * warp_dq_floats() * 4 + value_bytes() + mask +
                                    kept_stages * kept_bytes());
  }
};

/// A call gets the first row of its kind (plain, listed, drops, general) with enough dims. The last three
/// take block masks with other features, and those whose blocks are too small for the tiles of plain calls.
struct Configs {
  static constexpr Config rows[] = {
      {.dim = 64, .dim_v = 64, .queries = 128},
      {.dim = 96, .dim_v = 96, .queries = 64, .preload = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .turns = true, .preload = true},
      {.dim = 192, .dim_v = 128, .queries = 64, .keys = 64},
      {.dim = 192, .dim_v = 192, .queries = 64, .keys = 64},
      {.dim = 256, .dim_v = 256, .queries = 64, .keys = 64, .d_o_stages = 1, .preload = true},
      {.dim = 64, .dim_v = 64, .queries = 128, .listed = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .listed = true, .turns = true, .preload = true},
      {.dim = 256, .dim_v = 256, .queries = 64, .listed = true, .keys = 64, .d_o_stages = 1, .preload = true},
      {.dim = 64,
       .dim_v = 64,
       .queries = 64,
       .drops = true,
       .producer_warps = 8,
       .producer_registers = 56,
       .draws_at_once = 4},
      {.dim = 256,
       .dim_v = 256,
       .queries = 64,
       .drops = true,
       .keys = 64,
       .d_o_stages = 1,
       .preload = true,
       .producer_warps = 8},
      {.dim = 64, .dim_v = 64, .queries = 64, .general = true, .producer_warps = 8},
      {.dim = 128, .dim_v = 128, .queries = 64, .general = true, .turns = true, .producer_warps = 8},
      {.dim = 256,
       .dim_v = 256,
       .queries = 64,
       .general = true,
       .keys = 64,
       .q_stages = 1,
       .d_o_stages = 1,
       .producer_warps = 8},
      {.dim = 64, .dim_v = 64, .queries = 64, .general = true, .listed = true, .producer_warps = 8},
      {.dim = 128,
       .dim_v = 128,
       .queries = 64,
       .general = true,
       .listed = true,
       .turns = true,
       .producer_warps = 8},
      {.dim = 256,
       .dim_v = 256,
       .queries = 64,
       .general = true,
       .listed = true,
       .keys = 64,
       .q_stages = 1,
       .d_o_stages = 1,
       .producer_warps = 8}};
};
inline constexpr int most_dim = 256;

inline constexpr std::size_t most_shared_bytes = 232448;  ///< the most that a CTA on Hopper can have

/// The number of stages of a mask and a block mask's bits, and of dropout's bits.
struct FeatureStages {
  int mask = 0, kept = 0;

  constexpr bool operator==(const FeatureStages&) const = default;
};

/// As many stages as shared memory has room for, or none if it has too little. `element_bytes` is that of the
/// mask, or 0 without one.
constexpr FeatureStages stages_of(const Config& c, int element_bytes, bool dropout) {
  const int mask_bytes = (element_bytes > 0 ? c.mask_bytes(element_bytes) : 0) + c.seen_bytes();
  for (int mask = Config::most_mask_stages; mask > 0; --mask) {
    for (int kept = dropout ? 2 : 0; kept >= (dropout ? 1 : 0); --kept) {
      if (c.shared_bytes(mask * mask_bytes, kept) <= most_shared_bytes) return {mask, kept};
    }
  }
  return {};
}

constexpr bool fits(const Config& c) {
  if (!c.general) {
    return c.shared_bytes(Config::most_mask_stages * c.seen_bytes(), c.drops ? 1 : 0) <= most_shared_bytes;
  }
  // With a block mask there is no room for dropout beside a mask of f32.
  return stages_of(c, 4, !c.listed).mask > 0 && stages_of(c, 2, true).mask > 0;
}
static_assert(std::ranges::all_of(Configs::rows, fits));

}  // namespace tilewise::cuda::wgmma_backward
