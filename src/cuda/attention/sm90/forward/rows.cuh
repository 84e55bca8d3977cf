#pragma once

#include "cuda/attention/sm90/decode/combine.cuh"
#include "cuda/attention/sm90/forward/choice.h"
#include "cuda/attention/sm90/forward/forward.cuh"
#include "cuda/attention/sm90/forward/forward.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/owner.h"
#include "cuda/tile/tensor_map.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma {

/// Whether a tensor map can describe the rows: they start at multiples of 16 bytes, and no stride is
/// negative.
inline bool increasing(const Rows& rows) {
  return aligned_chunks(rows) && rows.stride_b >= 0 && rows.stride_h >= 0 && rows.stride_s >= 0;
}

/// The decoding kernel's own parameters. Partial results of splits are in the workspace.
inline DecodeArguments decode_arguments(const AttentionCall& call, const Context& context,
                                        const DecodePlan& plan) {
  const SplitSpace space = SplitSpace::of(call, plan);
  auto* const first = static_cast<std::byte*>(context.workspace.data) + SplitSpace::counter_bytes;
  const std::int64_t entry_rows = call.packed() ? 0 : call.problem.heads_q * call.problem.length_q;
  const std::int64_t head_rows = call.packed() ? call.total_q : call.problem.length_q;
  return {.heads_log2 = plan.heads_log2,
          .splits = plan.splits,
          .o = {first, DType::f32, entry_rows * space.row_floats, head_rows * space.row_floats,
                space.row_floats, true},
          .lse = {first + space.o_bytes(), DType::f32, entry_rows, head_rows, 1, true},
          .rows = space.rows};
}

/// The arguments of a row's kernel, from those that all kernels share.
template <ForwardConfig c>
ArgumentsOf<c.combined()> arguments_of(const ForwardArguments& of_all, const AttentionCall& call) {
  if constexpr (c.combined()) {
    return {of_all, OddMask::of(call)};
  } else {
    return of_all;
  }
}

template <typename T, typename Table, int row>
void run_row(const AttentionCall& call, const Context& context, const DecodePlan& plan = {.splits = 1}) {
  constexpr ForwardConfig c = Table::rows[row];
  const AttentionProblem& problem = call.problem;
  const std::int64_t entries = call.packed() ? 1 : problem.batch;
  const std::int64_t rows_q = call.packed() ? call.total_q : problem.length_q;
  const std::int64_t rows_k = call.packed() ? call.total_k : problem.length_k;
  const std::int64_t together = std::int64_t{1} << plan.heads_log2;
  MapsOf<Table> maps{};
  if constexpr (c.decode) {
    maps.q = map_of_groups(call.q, entries, problem.heads_q, together, rows_q, problem.dim_qk,
                           64 >> plan.heads_log2);
  } else {
    maps.q = map_of(call.q, entries, problem.heads_q, rows_q, problem.dim_qk, 64);
  }
  if (rows_k > 0) {  // otherwise nothing is loaded
    maps.k = map_of(call.k, entries, problem.heads_kv, rows_k, problem.dim_qk, c.keys);
    maps.v = map_of(call.v, entries, problem.heads_kv, rows_k, problem.dim_v, c.keys);
  }
  const bool mapped_o = (c.staged || c.paneled) && increasing(call.o);
  if (mapped_o) maps.o = map_of(call.o, entries, problem.heads_q, rows_q, problem.dim_v, 16);
  if constexpr (c.blocks) {
    if (problem.features.block_mask && call.blocks.tile_count > 0)
      maps.mask = map_of_tiles(call.blocks, c.keys);
  }
  if constexpr (c.masked) {
    if (problem.features.mask != MaskKind::none && problem.aligned_mask)
      maps.mask = map_of_mask(call.mask, problem, MaskArguments::rows_of(call), c.keys);
  }
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  auto* counter = static_cast<unsigned long long*>(context.workspace.data);
  constexpr double log2_e = 1.4426950408889634;
  const bool natural = (c.masked && problem.features.mask == MaskKind::additive) ||
                       (c.general && GeneralArguments::of(call).changes_scores());
  const ForwardArguments of_all{
      .schedule = schedule_of(call, c, multiprocessors, plan),
      .counter = {counter, new_owner()},
      .band = BandOfKeys::of(call),
      .heads = static_cast<int>(problem.heads_q / together),
      .group = static_cast<int>(call.group() / together),
      .dim_v = static_cast<int>(problem.dim_v),
      .scale_log2 = static_cast<float>((natural ? 1.0 : call.scale) * log2_e),
      .scale_lse = LseScale::of(call, natural),
      .aligned_o = aligned_chunks(call.o),
      .mapped_o = mapped_o,
      .o = call.o,
      .lse = call.lse,
      .general = c.general ? GeneralArguments::of(call) : GeneralArguments{},
      .decode = c.decode ? decode_arguments(call, context, plan) : DecodeArguments{},
      .mask = c.masked || c.drops ? MaskArguments::of(call) : MaskArguments{},
      .blocks = c.blocks || (c.may_pad() && problem.features.block_mask) ? BlockArguments::of(call, c.keys)
                                                                         : BlockArguments{},
      .padding = c.masked ? PaddingArguments::of(call) : PaddingArguments{}};
  const ArgumentsOf<c.combined()> arguments = arguments_of<c>(of_all, call);
  launch<forward_kernel<T, Table, row>>({.name = "tilewise wgmma forward",
                                         .blocks = arguments.schedule.blocks,
                                         .threads = c.threads(),
                                         .shared_bytes = c.shared_bytes(),
                                         .stream = static_cast<cudaStream_t>(context.stream)},
                                        maps, arguments);
  if constexpr (c.decode) {
    if (plan.splits > 1) {
      call.o.dtype == DType::f32 ? combine_splits<float>(call, arguments, context)
                                 : combine_splits<T>(call, arguments, context);
    }
  }
}

/// Runs the chosen row. All rows of the table are compiled.
template <typename T, typename Table>
void run_chosen(const AttentionCall& call, const Context& context, int chosen,
                const DecodePlan& plan = {.splits = 1}) {
  with_row<Table>(chosen, [&](auto row) { run_row<T, Table, row>(call, context, plan); });
}

}  // namespace tilewise::cuda::wgmma
