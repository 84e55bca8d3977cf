#pragma once

#include <algorithm>
#include <cmath>

#include "attention/problem.h"
#include "cuda/attention/sm90/backward/config.h"

namespace tilewise::cuda::wgmma_backward {

/// How CTAs share the keys of a tile, where key tiles are few: each has some of the group's query heads, and
/// some of the query tiles that see the keys. Each stores its dK and dV in f32, and another kernel adds them.
struct Splits {
  int heads = 1;    ///< shares of the group's query heads; divides the group
  int queries = 1;  ///< shares of the query tiles

  constexpr int count() const { return heads * queries; }
  constexpr bool operator==(const Splits&) const = default;
};

/// The time that the tile kernel and the sum of its splits take, estimated in microseconds. An H200 timed 118
/// shapes of one to four sequences (bench/sweep_wgmma_backward_splits.cu). For 109 of them it timed the
/// splits that this chooses: in the median these are the best, in 17 shapes they take 5 to 17 % more, mostly
/// where it chooses none, and they always take less than mma.
class SplitTimes {
 public:
  SplitTimes(const AttentionProblem& problem, const Config& c, int multiprocessors)
      : multiprocessors_(multiprocessors) {
    const auto tiles = [](std::int64_t rows, int size) {
      return static_cast<double>((rows + size - 1) / size);
    };
    const bool packed = problem.layout == Layout::packed;
    const auto sequences = static_cast<double>(std::max<std::int64_t>(problem.batch, 1));
    const auto group = static_cast<double>(problem.heads_q / problem.heads_kv);
    const auto heads = static_cast<double>(problem.heads_kv);
    ctas_ = heads * (packed ? tiles(problem.keys, c.keys) : sequences * tiles(problem.length_k, c.keys));
    // A window hides as many queries of a key as keys of a query.
    const std::int64_t seen = std::min(problem.length_q, problem.most_keys + c.keys);
    longest_ = group * tiles(seen, c.queries);
    const double length = static_cast<double>(problem.queries) / sequences;
    uneven_ = packed || (problem.features.causal && !problem.features.window);
    mean_ = group * std::min<double>(static_cast<double>(seen), length) / c.queries;
    if (problem.features.causal && !problem.features.window) mean_ /= 2;
    // 10 FLOPs per pair and dim, at the rate of long sequences.
    constexpr double flops_per_us = 4.5e6;
    tile_us_ = 5.0 * c.queries * c.keys * (c.dim + c.dim_v) / flops_per_us;
    joined_bytes_ =
        heads * static_cast<double>(problem.keys) * static_cast<double>(problem.dim_qk + problem.dim_v) * 4;
  }

  double us(int splits) const {
    constexpr double start_us = 6;  // to start and to end a CTA
    // Storing f32 to memory that all CTAs share, and a launch that reads it.
    constexpr double store_us = 3, launch_us = 4, bytes_per_us = 2.5e6;
    const double begin = start_us + (splits > 1 ? store_us : 0);
    const double longest = longest_ / splits * tile_us_ + begin, mean = mean_ / splits * tile_us_ + begin;
    const double rounds = ctas_ * splits / multiprocessors_;
    const double tiles = uneven_ ? std::max(longest, rounds * mean) : std::ceil(rounds) * longest;
    return tiles + (splits > 1 ? launch_us + splits * joined_bytes_ / bytes_per_us : 0);
  }

 private:
  int multiprocessors_;
  double ctas_, longest_, mean_, tile_us_, joined_bytes_;
  bool uneven_;
};

/// The splits that are expected to take the least time. They depend on the whole batch, so batch_invariant
/// calls have none.
inline Splits splits_of(const AttentionProblem& problem, const Config& c, int multiprocessors) {
  if (problem.batch_invariant || problem.heads_kv == 0) return {};
  const auto group = static_cast<int>(problem.heads_q / problem.heads_kv);
  const std::int64_t query_tiles = (problem.length_q + c.queries - 1) / c.queries;
  const SplitTimes times(problem, c, multiprocessors);
  constexpr double least_gain = 1.05;  // estimates are rough, and splits need memory
  Splits best;
  double best_us = times.us(1) / least_gain;
  // Queries are shared only where each CTA already has one head.
  for (int heads = 1; heads <= group; ++heads) {
    if (group % heads != 0) continue;
    for (int queries = 1; queries <= std::min<std::int64_t>(8, query_tiles); queries *= 2) {
      const Splits splits{heads, queries};
      if (queries > 1 && heads < group) continue;
      if (const double us = times.us(splits.count()); us < best_us) {
        best = splits;
        best_us = us;
      }
    }
  }
  return best;
}

}  // namespace tilewise::cuda::wgmma_backward
