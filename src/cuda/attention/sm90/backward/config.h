#pragma once

#include <algorithm>
#include <cstddef>

namespace tilewise::cuda::wgmma_backward {

/// How a CTA is cut. It keeps some keys and walks over tiles of queries, which a producer warpgroup brings by
/// TMA.
///
/// Up to dim 128 two consumer warpgroups have 64 of 128 keys each. Beyond, dK and dV of 64 keys would not fit
/// into a warpgroup's registers: there (`wide`) both have the same 64 keys. S and dP are shared out by
/// queries, dK, dV and dQ by dims, and P and dS pass through shared memory.
struct Config {
  int dim = 0;           ///< of Q and K, which are padded to it
  int dim_v = 0;         ///< of V and dO, the same
  int queries = 0;       ///< of a tile: 64, or 128 at dim 64
  bool general = false;  ///< takes softcap, ALiBi, masks and dropout
  bool listed = false;   ///< and block masks, by lists
  int keys = 128;
  int q_stages = 2;
  int d_o_stages = 2;
  bool turns = false;  ///< one consumer at a time makes P
  bool preload =
      false;  ///< the plain kernel: S begins with -LSE, which takes fewer registers than to add it later
  bool in_step = false;     ///< the general kernel: consumers meet at each tile, and each warp adds its dQ
  bool persistent = false;  ///< plain, of dims 65 to 128: a CTA has one job after another, and loads ahead
  int producer_warps = 4;
  static constexpr int ds_stages = 2;  ///< of dS, and of P where it passes through shared memory
  static constexpr int consumers = 2;
  static constexpr int consumer_warps = 4 * consumers;
  static constexpr int consumer_threads = 128 * consumers;
  static constexpr int producer_registers = 24;
  constexpr int threads() const { return consumer_threads + 32 * producer_warps; }
  constexpr int drawing_warps() const {
    return producer_warps / 2;
  }  ///< of the general kernel: the last ones
  /// A CTA begins with as many registers per thread as all its threads can have. Consumers get what the
  /// producers leave.
  constexpr int consumer_registers() const {
    const int at_first = 65536 / threads() / 8 * 8;
    return (at_first * threads() - 32 * producer_warps * producer_registers) / consumer_threads / 8 * 8;
  }

  constexpr bool operator==(const Config&) const = default;
  constexpr bool wide() const { return dim > 128; }
  /// The producer tells consumers what tile they are at. For lists, and with features where consumers do not
  /// keep step, they have too few registers to walk themselves.
  constexpr bool told() const { return listed || (general && !in_step); }
  constexpr int own_queries() const { return wide() ? queries / 2 : queries; }  ///< of a consumer's S and dP

  // Shared memory has panels of 64 dims, of which products leave out what is beyond the head dim.
  constexpr int panels() const { return (dim + 63) / 64; }
  constexpr int panels_v() const { return (dim_v + 63) / 64; }

  /// Which panels of dK and dV a consumer has, where these are shared out (`wide`). Of three panels one
  /// consumer has two of dK, the other two of dV.
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
  /// And of dQ: the consumer with less of dK has more of it.
  constexpr int first_dq_panel(int consumer) const { return consumer * panels() / 2; }
  constexpr int dq_panels(int consumer) const {
    return consumer == 0 ? first_dq_panel(1) : panels() - first_dq_panel(1);
  }
  /// How many of these a consumer computes at once. At dim 256 it has registers and shared memory for one.
  constexpr int dq_panels_at_once(int consumer) const { return dim == 192 ? dq_panels(consumer) : 1; }
  constexpr int dq_buffers() const { return wide() ? dq_panels_at_once(0) + dq_panels_at_once(1) : 2; }
  constexpr bool even() const { return panels() % 2 == 0 && panels_v() % 2 == 0; }  ///< for both consumers

  /// Who computes a part of dQ. From dim 96 on each consumer has a half of the panels, at dim 64 half of the
  /// queries. In step consumers take turns at dim 64, tile by tile.
  constexpr bool dq_in_turn() const { return dim == 64 && in_step; }
  constexpr bool dq_by_queries() const { return dim == 64 && !in_step; }
  /// Where the sums of 16 dims begin in those of a tile: [halves of the queries, dim / 16, eights, 128].
  /// dQ is computed in parts of 64 dims, transposed; a warp has 16 of these.
  constexpr int dq_queries() const { return queries / dq_halves(); }
  constexpr int warp_dq_floats() const { return 16 * dq_queries(); }
  constexpr int dq_halves() const { return dq_by_queries() ? 2 : 1; }
  constexpr int dq_offset(int half, int chunk) const {
    return (half * (dim / 16) + chunk) * warp_dq_floats();
  }
  /// Threads of the producer add dQ. Where consumers have keys of their own, dQ is a tile behind, so that
  /// they need not keep step.
  constexpr bool stores_apart() const { return !in_step; }
  constexpr bool lagged() const { return !in_step && !wide(); }
  /// Beside the rules of scores there are no registers for dP: it is computed together with dV.
  constexpr bool late_dp() const { return general && !wide() && dim > 64; }
  constexpr int dq_chunks() const { return dim / 16 * dq_halves(); }  ///< what warps add, of a tile

  constexpr int k_bytes() const { return keys * panels() * 128; }
  constexpr int v_bytes() const { return keys * panels_v() * 128; }
  constexpr int q_bytes() const { return queries * panels() * 128; }      ///< a stage of Q
  constexpr int d_o_bytes() const { return queries * panels_v() * 128; }  ///< a stage of dO
  constexpr int ds_bytes() const { return keys * queries * 2; }           ///< a stage of dS, or of P
  constexpr int kept_words() const { return keys / 32; }                  ///< bits of the keys of a query
  constexpr int kept_bytes() const { return kept_words() * queries * 4; }
  constexpr int row_values() const {
    return general ? 3 : 2;
  }  ///< LSE, delta, and the general kernel's offset
  constexpr int barriers() const {
    return 2 * (q_stages + d_o_stages) + 1 + (general ? 4 + 2 * most_mask_stages() : 0) + (lagged() ? 4 : 0) +
           (stores_apart() ? 4 : 0) + (persistent ? 5 : 0);
  }
  /// The general kernel's mask and a block mask's bits have two stages where there is room for them.
  constexpr int most_mask_stages() const { return in_step ? 1 : 2; }
  static constexpr int step_bytes = 32;  ///< of a Step and what its queries see, at most
  static constexpr int job_bytes = 64;   ///< of a Job, at most
  /// Values of rows, barriers, Words, Steps and jobs, up to where a mask may begin.
  constexpr int value_bytes() const {
    return (row_values() * q_stages * queries * 4 + barriers() * 8 + (general ? 24 : 16) +
            (told() ? 2 * step_bytes : 0) + (persistent ? 2 * job_bytes : 0) +
            (listed && in_step ? kept_bytes() : 0) + 1023) /
           1024 * 1024;
  }
  /// A stage of a block mask's bits. In step they lie at the end of the values.
  constexpr int seen_bytes() const { return listed && !in_step ? kept_bytes() : 0; }
  /// Of a tile's mask, whose boxes have 128 bytes of a row: of booleans those of 128 keys.
  constexpr int mask_bytes(int element_bytes) const {
    return queries * (keys * element_bytes < 128 ? 128 : keys * element_bytes);
  }

  /// `mask`, the bytes of all stages, and `kept_stages` of the general kernel depend on the call.
  constexpr std::size_t shared_bytes(int mask = 0, int kept_stages = 0) const {
    return static_cast<std::size_t>(k_bytes() + v_bytes() + q_stages * q_bytes() + d_o_stages * d_o_bytes() +
                                    (wide() ? 2 : 1) * ds_stages * ds_bytes() +
                                    dq_buffers() * 4 * warp_dq_floats() * 4 + value_bytes() + mask +
                                    kept_stages * kept_bytes());
  }
};

/// Of each kind (plain, general, listed) the first that is wide enough is chosen.
struct Configs {
  static constexpr Config rows[] = {
      {.dim = 64, .dim_v = 64, .queries = 128},
      {.dim = 96, .dim_v = 96, .queries = 64, .preload = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .turns = true, .preload = true},
      {.dim = 192, .dim_v = 128, .queries = 64, .keys = 64},
      {.dim = 192, .dim_v = 192, .queries = 64, .keys = 64},
      {.dim = 256, .dim_v = 256, .queries = 64, .keys = 64, .d_o_stages = 1, .preload = true},
      {.dim = 64, .dim_v = 64, .queries = 64, .general = true, .in_step = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .general = true, .in_step = true},
      {.dim = 256,
       .dim_v = 256,
       .queries = 64,
       .general = true,
       .keys = 64,
       .q_stages = 1,
       .d_o_stages = 1,
       .in_step = true},
      {.dim = 64, .dim_v = 64, .queries = 64, .general = true, .listed = true, .in_step = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .general = true, .listed = true, .in_step = true},
      {.dim = 256,
       .dim_v = 256,
       .queries = 64,
       .general = true,
       .listed = true,
       .keys = 64,
       .q_stages = 1,
       .d_o_stages = 1,
       .in_step = true}};
};

/// On trial: features by the plan of the plain kernel. Consumers have keys of their own and do not meet, and
/// threads of the producer add dQ. Four more warps draw dropout.
struct LaggedConfigs {
  static constexpr Config rows[] = {
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
/// On trial: the plain kernel, a CTA for each SM. K, V, Q and dO of the next keys arrive while dK and dV
/// leave.
struct PersistentConfigs {
  static constexpr Config rows[] = {
      {.dim = 96, .dim_v = 96, .queries = 64, .preload = true, .persistent = true},
      {.dim = 128, .dim_v = 128, .queries = 64, .turns = true, .preload = true, .persistent = true}};
};
inline constexpr int most_dim = 256;

inline constexpr std::size_t most_shared_bytes = 232448;  ///< of a CTA on Hopper

/// Stages of a mask with a block mask's bits, and of dropout's bits.
struct FeatureStages {
  int mask = 0, kept = 0;

  constexpr bool operator==(const FeatureStages&) const = default;
};

/// As many as there is room for, or none where there is too little. `element_bytes` is 0 without a mask.
constexpr FeatureStages stages_of(const Config& c, int element_bytes, bool dropout) {
  const int mask_bytes = (element_bytes > 0 ? c.mask_bytes(element_bytes) : 0) + c.seen_bytes();
  for (int mask = c.most_mask_stages(); mask > 0; --mask) {
    for (int kept = dropout ? (c.in_step && element_bytes == 4 ? 1 : 2) : 0; kept >= (dropout ? 1 : 0);
         --kept) {
      if (c.shared_bytes(mask * mask_bytes, kept) <= most_shared_bytes) return {mask, kept};
    }
  }
  return {};
}

constexpr bool fits(const Config& c) {
  if (!c.general) return c.shared_bytes() <= most_shared_bytes;
  // With a block mask there is no room for dropout beside a mask of f32.
  return stages_of(c, 4, !c.listed).mask > 0 && stages_of(c, 2, true).mask > 0;
}
static_assert(std::ranges::all_of(Configs::rows, fits));
static_assert(std::ranges::all_of(LaggedConfigs::rows, fits));
static_assert(std::ranges::all_of(PersistentConfigs::rows, fits));

}  // namespace tilewise::cuda::wgmma_backward
