#pragma once

#include <iterator>
#include <utility>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/owner.h"
#include "cuda/tile/tensor_map.h"
#include "cuda/wgmma/forward.cuh"
#include "cuda/wgmma/forward.h"

namespace tilewise::cuda::wgmma {

// From a call to the row of a tuning table that it runs by.

/// Whether some queries see more keys than others, and many do.
inline bool uneven(const AttentionCall& call) {
  return (call.band.left < Band::unbounded) != (call.band.right < Band::unbounded);
}

inline Schedule schedule_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const std::int64_t tiles = (call.problem.length_q + c.rows() - 1) / c.rows();
  return Schedule::of(multiprocessors, static_cast<int>(call.problem.batch * call.problem.heads_q),
                      static_cast<int>(tiles), uneven(call));
}

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, const Context& context) {
  constexpr ForwardConfig c = Table::rows[row];
  const AttentionProblem& problem = call.problem;
  const ForwardMaps maps{
      .q = map_of(call.q, problem.batch, problem.heads_q, problem.length_q, problem.dim_qk, 64),
      .k = map_of(call.k, problem.batch, problem.heads_kv, problem.length_k, problem.dim_qk, c.keys),
      .v = map_of(call.v, problem.batch, problem.heads_kv, problem.length_k, problem.dim_v, c.keys)};
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* counter = static_cast<unsigned long long*>(context.workspace.data);
  const ForwardArguments arguments{.schedule = schedule_of(call, c, multiprocessors),
                                   .counter = {counter, new_owner()},
                                   .band = BandOfKeys::of(call),
                                   .heads_q = static_cast<int>(problem.heads_q),
                                   .group = static_cast<int>(call.group()),
                                   .dim_v = static_cast<int>(problem.dim_v),
                                   .scale = static_cast<float>(call.scale),
                                   .scale_log2 = static_cast<float>(call.scale * 1.4426950408889634),
                                   .aligned_o = aligned_chunks(call.o),
                                   .o = call.o,
                                   .lse = call.lse};
  launch<forward_kernel<T, Table, row>>({.name = "tilewise wgmma forward",
                                         .blocks = arguments.schedule.blocks,
                                         .threads = c.threads(),
                                         .shared_bytes = c.shared_bytes(),
                                         .stream = static_cast<cudaStream_t>(context.stream)},
                                        maps, arguments);
}

/// About how long a row of a table takes, in no unit.
inline double time_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const Schedule schedule = schedule_of(call, c, multiprocessors);
  const auto filled = [](std::int64_t length, int piece) {  // up to whole pieces, relative
    return static_cast<double>((length + piece - 1) / piece * piece) / static_cast<double>(length);
  };
  // Where blocks have many tiles, it matters that a consumer without queries leaves the others its time.
  const std::int64_t length_q = call.problem.length_q;
  const double idle = schedule.rounds() > 1 ? filled(length_q, c.rows()) / filled(length_q, 64) : 1.0;
  return schedule.rounds() * c.rows() * filled(call.problem.length_k, c.keys) /
         (idle * static_cast<double>(c.speed));
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
