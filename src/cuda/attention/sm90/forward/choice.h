#pragma once

#include <algorithm>

#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm90/decode/plan.h"
#include "cuda/attention/sm90/forward/arguments.h"
#include "cuda/runtime/check.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma {

// Which row of a tuning table a call uses.

/// Whether the call has more features than scale, causal and window. Batch_invariant calls take the same
/// kernels, so that a sequence alone has the bits that it has in a packed batch.
inline bool general(const AttentionCall& call) {
  const AttentionFeatures& features = call.problem.features;
  return call.problem.batch_invariant || call.packed() || features.key_lengths || features.sinks ||
         features.softcap || features.alibi || features.logit_scale;
}

/// Whether the call has a mask or dropout, which have kernels of their own.
inline bool masked(const AttentionCall& call) {
  return call.problem.features.mask != MaskKind::none || call.problem.features.dropout;
}

/// Whether the call has a mask or dropout that needs CombinedForward, because MaskedForward does not take it.
inline bool combined(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (features.mask == MaskKind::none && (features.block_mask || !features.dropout)) return false;
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (features.block_mask && (features.dropout || dim > most_dim_with_padding)) return true;
  return problem.layout == Layout::packed || features.key_lengths || features.sinks || features.softcap ||
         features.alibi || features.logit_scale || !problem.aligned_mask || dim > most_dim_with_mask;
}

/// Whether a block mask lists the keys, for which there are kernels, too. Beside another mask it is padding.
inline bool listed(const AttentionCall& call) {
  return call.problem.features.block_mask && call.problem.features.mask == MaskKind::none;
}

/// Whether such a call also has other features than scale, causal and window.
inline bool listed_with_more(const AttentionCall& call) {
  return listed(call) && (general(call) || call.problem.features.dropout);
}

/// Whether some queries see more keys than others. With a window, the first or the last ones see fewer.
inline bool uneven(const AttentionCall& call) {
  const AttentionFeatures& features = call.problem.features;
  return call.packed() || features.key_lengths || features.block_mask || call.band.bounded();
}

/// Whether the band hides keys on both sides of those that a query sees.
inline bool windowed(const AttentionCall& call) {
  return call.band.left < Band::unbounded && call.band.right < Band::unbounded;
}

/// Whether each query sees all keys that the one before it sees.
inline bool grows(const AttentionCall& call) {
  return call.band.left >= Band::unbounded && call.band.right < Band::unbounded;
}

/// Whether the last of a few Q tiles is mostly padding. With static striding the same CTAs would get all such
/// tiles.
inline bool short_last_tile(std::int64_t length_q, int queries) {
  constexpr std::int64_t few_tiles = 8;
  const std::int64_t last = length_q % queries;
  return length_q > queries && length_q <= few_tiles * queries && last > 0 && 4 * last <= 3 * queries;
}

inline Schedule schedule_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors,
                            const DecodePlan& plan = {.splits = 1}) {
  const AttentionProblem& problem = call.problem;
  const auto heads = static_cast<int>(problem.heads_q) >> plan.heads_log2;
  const auto batch = static_cast<int>(problem.batch);
  const int queries = c.rows() >> plan.heads_log2;  // queries per tile
  if (call.packed()) {
    return Schedule::of(multiprocessors, heads,
                        packed_tiles(static_cast<int>(call.total_q), batch, queries) * plan.splits, heads);
  }
  const auto tiles = static_cast<int>((problem.length_q + queries - 1) / queries) * plan.splits;
  const std::int64_t group = call.group() >> plan.heads_log2;
  // CTAs that run at the same time are at about the same queries of their heads.
  const std::int64_t keys_together =
      windowed(call) ? std::min(problem.length_k, call.band.left + call.band.right + 2 * queries)
                     : problem.length_k;
  const std::int64_t head_bytes = keys_together * (problem.dim_qk + problem.dim_v) * 2 / group;
  if (!c.general && !c.blocks && grows(call) && batch * heads * tiles <= multiprocessors) {
    return Schedule::of_mixed(batch * heads, tiles);
  }
  const bool ends_short = !uneven(call) && plan.splits == 1 && short_last_tile(problem.length_q, queries);
  int section = 0;
  if (uneven(call) || ends_short) {
    section = Schedule::section_of(batch * heads, head_bytes, windowed(call) ? window_heads : batch * heads);
  }
  return Schedule::of(multiprocessors, batch * heads, tiles, section, uneven(call));
}

// Rows are template parameters below: divisions by their constants then take a third of the time, and a call
// makes a hundred of them.

/// The number of K tiles that a tile of `queries` sees on average. All entries count as having the longest
/// length.
template <int queries, int keys>
float mean_key_tiles(const BandOfKeys& band) {
  constexpr int most_samples = 16;
  const int parts = (band.length_q + queries - 1) / queries;
  const int samples = std::min(parts, most_samples);
  int sum = 0;
  for (int n = 0; n < samples; ++n) {
    const int first = (parts > most_samples ? parts * n / most_samples : n) * queries;
    sum += band.tiles(first, std::min(first + queries, band.length_q), keys).count();
  }
  return static_cast<float>(sum) / static_cast<float>(samples);
}
/// The number of K tiles that the last Q tile sees: the most, if each query sees more keys than the one
/// before.
template <int queries, int keys>
float last_key_tiles(const BandOfKeys& band) {
  return static_cast<float>(band.tiles(std::max(0, band.length_q - queries), band.length_q, keys).count());
}

/// About how long a row of a table takes, in microseconds on the GPU it was tuned for.
template <ForwardConfig c>
double time_of(const AttentionCall& call, int multiprocessors) {
  const Schedule schedule = schedule_of(call, c, multiprocessors);
  const BandOfKeys band = BandOfKeys::of(call);
  const auto time = [&](float key_tiles) {
    const TileTime& of_row = uneven(call) ? c.uneven : c.even;
    return static_cast<double>(of_row.start + of_row.step * key_tiles);
  };
  constexpr int part = 64;
  if (schedule.mixed) {  // between the average of the consumers and the first consumer
    const int parts = (band.length_q + part - 1) / part;
    const float filled = static_cast<float>(parts) / static_cast<float>(schedule.tiles * c.consumers);
    return time((filled * mean_key_tiles<part, c.keys>(band) + last_key_tiles<part, c.keys>(band)) / 2);
  }
  if (!uneven(call)) {
    double rounds = schedule.rounds();
    if (schedule.counted()) {
      // A partly filled tile takes less time, but saves only about half of its missing share.
      const double filled = static_cast<double>(band.length_q) / (schedule.tiles * c.rows());
      rounds = (0.5 + 0.5 * filled) * schedule.total() / schedule.blocks;
    }
    return rounds * time(mean_key_tiles<part, c.keys>(band));
  }
  const double rounds = schedule.counted() ? static_cast<double>(schedule.total()) / schedule.blocks : 1.0;
  const double all = rounds * time(mean_key_tiles<c.rows(), c.keys>(band));
  return grows(call) ? std::max(all, time(last_key_tiles<c.rows(), c.keys>(band))) : all;
}

/// Whether a row of a table can run a call, and has the smallest head dims of those that can.
template <typename Table>
auto able_row(const AttentionCall& call) {
  const std::int64_t dim_qk = call.problem.dim_qk, dim_v = call.problem.dim_v;
  const bool drops = call.problem.features.dropout, pads = call.problem.features.block_mask && !listed(call);
  const auto sufficient = [=](const ForwardConfig& c) {
    return c.dim >= dim_qk && c.dim_v >= dim_v && (c.drops == drops || c.may_drop()) &&
           (c.pads == pads || c.combined());
  };
  const auto dims = [](const ForwardConfig& c) { return c.dim + c.dim_v; };
  const int least = smallest<Table>(sufficient, dims);
  return [=](const ForwardConfig& c) { return dims(c) == least && sufficient(c); };
}

/// The row of a table for a call, and about how long it takes.
struct ChosenRow {
  int row = -1;
  double time = 0;
};
template <typename Table>
ChosenRow choose_row(const AttentionCall& call, int multiprocessors) {
  double times[row_count<Table>];
  const int chosen = least_row<Table>(able_row<Table>(call), [&](auto row) {
    return times[row] = time_of<Table::rows[row]>(call, multiprocessors);
  });
  if (chosen < 0) throw DeviceError("tilewise wgmma forward: no tiles for these head dims");
  return {chosen, times[chosen]};
}

/// The row of a table that computes a call: of DecodeForward if the plan has splits.
struct Choice {
  DecodePlan decode;
  int row = 0;
};
Choice choose(const AttentionCall& call, int multiprocessors);

}  // namespace tilewise::cuda::wgmma
