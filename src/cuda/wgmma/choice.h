#pragma once

#include <algorithm>
#include <iterator>

#include "cuda/runtime/check.h"
#include "cuda/wgmma/arguments.h"
#include "cuda/wgmma/few.h"

namespace tilewise::cuda::wgmma {

// Which row of a tuning table a call runs by.

/// Whether the call has more than scale, causal and window.
inline bool general(const AttentionCall& call) {
  const AttentionFeatures& features = call.problem.features;
  return call.packed() || features.key_lengths || features.sinks || features.softcap || features.alibi;
}

/// Whether some queries see more keys than others, and many do.
inline bool uneven(const AttentionCall& call) {
  if (call.packed() || call.problem.features.key_lengths) return true;
  return (call.band.left < Band::unbounded) != (call.band.right < Band::unbounded);
}

/// Whether a query sees all keys that the one before it sees.
inline bool grows(const AttentionCall& call) {
  return call.band.left >= Band::unbounded && call.band.right < Band::unbounded;
}

/// Whether the last of few tiles has few queries: with every 132nd the same blocks would have all of these.
inline bool short_last_tile(std::int64_t length_q, int queries) {
  constexpr std::int64_t few_tiles = 8;
  const std::int64_t last = length_q % queries;
  return length_q > queries && length_q <= few_tiles * queries && last > 0 && 4 * last <= 3 * queries;
}

inline Schedule schedule_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors,
                            const FewPlan& plan = {.shares = 1}) {
  const AttentionProblem& problem = call.problem;
  const auto heads = static_cast<int>(problem.heads_q) >> plan.heads_log2;
  const auto batch = static_cast<int>(problem.batch);
  const int queries = c.rows() >> plan.heads_log2;  // a tile
  if (call.packed()) {
    return Schedule::of(multiprocessors, heads,
                        packed_tiles(static_cast<int>(call.total_q), batch, queries) * plan.shares, heads);
  }
  const auto tiles = static_cast<int>((problem.length_q + queries - 1) / queries) * plan.shares;
  const std::int64_t group = call.group() >> plan.heads_log2;
  const std::int64_t head_bytes = problem.length_k * (problem.dim_qk + problem.dim_v) * 2 / group;
  if (!c.general && grows(call) && batch * heads * tiles <= multiprocessors) {
    return Schedule::of_mixed(batch * heads, tiles);
  }
  const bool ends_short = !uneven(call) && plan.shares == 1 && short_last_tile(problem.length_q, queries);
  return Schedule::of(multiprocessors, batch * heads, tiles,
                      uneven(call) || ends_short ? Schedule::section_of(batch * heads, head_bytes) : 0,
                      uneven(call));
}

/// Tiles of keys that so many queries see something of, on average; of all entries as of the longest.
inline float mean_key_tiles(const BandOfKeys& band, int queries, int keys) {
  constexpr int most_samples = 16;
  const int parts = (band.length_q + queries - 1) / queries;
  const int samples = std::min(parts, most_samples);
  int sum = 0;
  for (int n = 0; n < samples; ++n) {
    const int first = static_cast<int>(std::int64_t{parts} * n / samples) * queries;
    sum += band.tiles(first, std::min(first + queries, band.length_q), keys).count();
  }
  return static_cast<float>(sum) / static_cast<float>(samples);
}
/// Those of the last queries, which where bands grow are the most.
inline float last_key_tiles(const BandOfKeys& band, int queries, int keys) {
  return static_cast<float>(band.tiles(std::max(0, band.length_q - queries), band.length_q, keys).count());
}

/// About how long a row of a table takes, in microseconds of the GPU it was tuned on.
inline double time_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const Schedule schedule = schedule_of(call, c, multiprocessors);
  const BandOfKeys band = BandOfKeys::of(call);
  const auto time = [&](float key_tiles) {
    const TileTime& of_row = uneven(call) ? c.uneven : c.even;
    return static_cast<double>(of_row.start + of_row.step * key_tiles);
  };
  constexpr int part = 64;
  if (schedule.mixed) {  // between what consumers have on average and what the first has
    const int parts = (band.length_q + part - 1) / part;
    const float filled = static_cast<float>(parts) / static_cast<float>(schedule.tiles * c.consumers);
    return time((filled * mean_key_tiles(band, part, c.keys) + last_key_tiles(band, part, c.keys)) / 2);
  }
  if (!uneven(call)) {
    double rounds = schedule.rounds();
    if (schedule.counted()) {
      // A tile of few queries takes less, but more than its share: about half of what it lacks.
      const double filled = static_cast<double>(band.length_q) / (schedule.tiles * c.rows());
      rounds = (0.5 + 0.5 * filled) * schedule.total() / schedule.blocks;
    }
    return rounds * time(mean_key_tiles(band, part, c.keys));
  }
  const double rounds = schedule.counted() ? static_cast<double>(schedule.total()) / schedule.blocks : 1.0;
  const double all = rounds * time(mean_key_tiles(band, c.rows(), c.keys));
  return grows(call) ? std::max(all, time(last_key_tiles(band, c.rows(), c.keys))) : all;
}

/// The row of a table that suits a call.
template <typename Table>
int choose_row(const AttentionCall& call, int multiprocessors) {
  int chosen = -1;
  double least = 0;
  for (int row = 0; row < static_cast<int>(std::size(Table::rows)); ++row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.dim < call.problem.dim_qk || c.dim_v < call.problem.dim_v) continue;
    if (chosen >= 0 && c.dim + c.dim_v > Table::rows[chosen].dim + Table::rows[chosen].dim_v) break;
    const double time = time_of(call, c, multiprocessors);
    if (chosen < 0 || time < least) {
      chosen = row;
      least = time;
    }
  }
  if (chosen < 0) throw DeviceError("tilewise wgmma forward: no tiles for these head dims");
  return chosen;
}

/// Whether blocks of that row count tiles, for which they need a word.
template <typename Table>
bool counts_tiles(const AttentionCall& call, int multiprocessors) {
  const ForwardConfig& c = Table::rows[choose_row<Table>(call, multiprocessors)];
  return schedule_of(call, c, multiprocessors).counted();
}

}  // namespace tilewise::cuda::wgmma
