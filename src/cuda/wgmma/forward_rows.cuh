#pragma once

#include <atomic>
#include <iterator>
#include <utility>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/wgmma/forward.cuh"
#include "cuda/wgmma/forward.h"
#include "cuda/wgmma/tensor_map.h"

namespace tilewise::cuda::wgmma {

// From a call to the row of a tuning table that it runs by.

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

/// A number that no other launch has, and that memory nobody wrote, or wrote 0xFF to, does not have by
/// chance.
inline std::uint32_t new_owner() {
  static std::atomic<std::uint32_t> next{0x5C3A19E7u};
  std::uint32_t owner = next.fetch_add(1);
  while (owner == 0 || owner == 0xFFFFFFFFu) owner = next.fetch_add(1);
  return owner;
}

inline Schedule schedule_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const AttentionProblem& problem = call.problem;
  const auto heads = static_cast<int>(problem.heads_q);
  const auto batch = static_cast<int>(problem.batch);
  if (call.packed()) {
    return Schedule::of(multiprocessors, heads, packed_tiles(static_cast<int>(call.total_q), batch, c.rows()),
                        heads);
  }
  const auto tiles = static_cast<int>((problem.length_q + c.rows() - 1) / c.rows());
  const std::int64_t head_bytes = problem.length_k * (problem.dim_qk + problem.dim_v) * 2 / call.group();
  return Schedule::of(multiprocessors, batch * heads, tiles,
                      uneven(call) ? Schedule::section_of(head_bytes) : 0);
}

/// Whether rows can be mapped: they begin at multiples of 16 bytes, in order of their indices.
inline bool increasing(const Rows& rows) {
  return aligned_chunks(rows) && rows.stride_b >= 0 && rows.stride_h >= 0 && rows.stride_s >= 0;
}

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, const Context& context) {
  constexpr ForwardConfig c = Table::rows[row];
  const AttentionProblem& problem = call.problem;
  const std::int64_t entries = call.packed() ? 1 : problem.batch;
  const std::int64_t rows_q = call.packed() ? call.total_q : problem.length_q;
  const std::int64_t rows_k = call.packed() ? call.total_k : problem.length_k;
  ForwardMaps maps{.q = map_of(call.q, entries, problem.heads_q, rows_q, problem.dim_qk, 64)};
  if (rows_k > 0) {  // else there is nothing to load
    maps.k = map_of(call.k, entries, problem.heads_kv, rows_k, problem.dim_qk, c.keys);
    maps.v = map_of(call.v, entries, problem.heads_kv, rows_k, problem.dim_v, c.keys);
  }
  const bool mapped_o = c.staged && increasing(call.o);
  if (mapped_o) maps.o = map_of(call.o, entries, problem.heads_q, rows_q, problem.dim_v, 16);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* counter = static_cast<unsigned long long*>(context.workspace.data);
  constexpr double log2_e = 1.4426950408889634;
  const bool natural = c.general && (problem.features.softcap || problem.features.alibi);
  const ForwardArguments arguments{.schedule = schedule_of(call, c, multiprocessors),
                                   .counter = {counter, new_owner()},
                                   .band = BandOfKeys::of(call),
                                   .heads_q = static_cast<int>(problem.heads_q),
                                   .group = static_cast<int>(call.group()),
                                   .dim_v = static_cast<int>(problem.dim_v),
                                   .scale_log2 = static_cast<float>((natural ? 1.0 : call.scale) * log2_e),
                                   .scale_lse = static_cast<float>(natural ? 1.0 : call.scale * mended(call)),
                                   .aligned_o = aligned_chunks(call.o),
                                   .mapped_o = mapped_o,
                                   .o = call.o,
                                   .lse = call.lse,
                                   .general = c.general ? GeneralArguments::of(call) : GeneralArguments{}};
  launch<forward_kernel<T, Table, row>>({.name = "tilewise wgmma forward",
                                         .blocks = arguments.schedule.blocks,
                                         .threads = c.threads(),
                                         .shared_bytes = c.shared_bytes(),
                                         .stream = static_cast<cudaStream_t>(context.stream)},
                                        maps, arguments);
}

/// Tiles of keys that a tile of queries has, on average; of all entries as of the longest.
inline float mean_key_tiles(const BandOfKeys& band, const ForwardConfig& c) {
  constexpr int most_samples = 16;
  const int tiles = (band.length_q + c.rows() - 1) / c.rows();
  const int samples = std::min(tiles, most_samples);
  int sum = 0;
  for (int n = 0; n < samples; ++n) {
    const int first = static_cast<int>(std::int64_t{tiles} * n / samples) * c.rows();
    sum += band.tiles(first, std::min(first + c.rows(), band.length_q), c.keys).count();
  }
  return static_cast<float>(sum) / static_cast<float>(samples);
}

/// About how long a row of a table takes, in microseconds of the GPU it was tuned on.
inline double time_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const Schedule schedule = schedule_of(call, c, multiprocessors);
  const double rounds = schedule.counted()
                            ? static_cast<double>(schedule.total()) / static_cast<double>(schedule.blocks)
                            : static_cast<double>(schedule.rounds());
  const TileTime& time = uneven(call) ? c.uneven : c.even;
  return rounds * static_cast<double>(time.start + time.step * mean_key_tiles(BandOfKeys::of(call), c));
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

/// Runs the row that suits; all of the table is compiled.
template <typename T, typename Table>
void run_suited(const AttentionCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const int chosen = choose_row<Table>(call, multiprocessors);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<T, Table, row>(call, context) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::wgmma
