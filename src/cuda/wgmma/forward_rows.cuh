#pragma once

#include <iterator>
#include <utility>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/wgmma/forward.cuh"
#include "cuda/wgmma/forward.h"
#include "cuda/wgmma/tensor_map.h"

namespace tilewise::cuda::wgmma {

// From a call to the row of a tuning table that it runs by.

/// Tiles of queries of all heads, and whether some see more keys than others.
inline Schedule schedule_of(const AttentionCall& call, const ForwardConfig& c, int multiprocessors) {
  const bool left = call.band.left < Band::unbounded;
  const bool right = call.band.right < Band::unbounded;
  const std::int64_t tiles = (call.problem.length_q + c.rows() - 1) / c.rows();
  return Schedule::of(multiprocessors, static_cast<int>(call.problem.batch * call.problem.heads_q),
                      static_cast<int>(tiles), left != right);
}

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, int multiprocessors, cudaStream_t stream) {
  constexpr ForwardConfig c = Table::rows[row];
  const AttentionProblem& problem = call.problem;
  const ForwardMaps maps{
      .q = map_of(call.q, problem.batch, problem.heads_q, problem.length_q, problem.dim_qk, 64),
      .k = map_of(call.k, problem.batch, problem.heads_kv, problem.length_k, problem.dim_qk, c.keys),
      .v = map_of(call.v, problem.batch, problem.heads_kv, problem.length_k, problem.dim_v, c.keys)};
  const ForwardArguments arguments{.schedule = schedule_of(call, c, multiprocessors),
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
                                         .stream = stream},
                                        maps, arguments);
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
    const Schedule schedule = schedule_of(call, c, multiprocessors);
    const double time = static_cast<double>(schedule.rounds()) * c.rows() / static_cast<double>(c.speed);
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
  const auto stream = static_cast<cudaStream_t>(context.stream);
  [&]<int... row>(std::integer_sequence<int, row...>) {
    ((row == chosen ? run_row<T, Table, row>(call, multiprocessors, stream) : void()), ...);
  }(std::make_integer_sequence<int, static_cast<int>(std::size(Table::rows))>{});
}

}  // namespace tilewise::cuda::wgmma
