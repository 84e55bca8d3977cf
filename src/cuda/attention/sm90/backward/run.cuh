#pragma once

#include <algorithm>
#include <iterator>

#include "core/arena.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/sm90/backward/kernel.cuh"
#include "cuda/attention/sm90/backward/pairs.cuh"
#include "cuda/attention/sm90/backward/rows.cuh"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_backward {

// The launches of backward: delta, tiles and dQ, and more with features.

/// Whether a call needs the general kernel. Sinks, which join after the last key, and padding do not, and
/// dropout does not unless the plain kernel would lack registers for it.
inline bool is_general(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  const bool general_dropout = features.dropout && (features.block_mask || (dim > 64 && dim <= 128));
  return (features.mask != MaskKind::none && !problem.key_mask) || features.softcap || features.alibi ||
         general_dropout;
}

/// Whether the blocks of a block mask are made of a row's tiles.
inline bool suits_blocks(const Config& c, const AttentionProblem& problem) {
  const auto suits = [](std::int64_t block, std::int64_t all, int tile) {
    return block % tile == 0 || block >= all;
  };
  return suits(problem.block_q, problem.length_q, c.queries) &&
         suits(problem.block_k, problem.length_k, c.keys);
}

/// The row of a table that takes a problem.
template <typename Table>
int row_of(const AttentionProblem& problem) {
  const auto takes = [&](const Config& c, bool general) {
    return c.general == general && c.listed == problem.features.block_mask &&
           c.drops == (problem.features.dropout && !general) && problem.dim_qk <= c.dim &&
           problem.dim_v <= c.dim_v;
  };
  const auto found = [&](bool general) {
    return std::ranges::find_if(Table::rows, [&](const Config& c) { return takes(c, general); });
  };
  const auto* row = found(is_general(problem));
  if (problem.features.block_mask && !suits_blocks(*row, problem)) row = found(true);
  return static_cast<int>(row - std::begin(Table::rows));
}

inline Sizes sizes_of(const AttentionCall& call, const Splits& splits) {
  const AttentionProblem& problem = call.problem;
  const auto whole = [](std::int64_t x) { return static_cast<int>(x); };
  return {.batch = whole(problem.batch),
          .heads_q = whole(problem.heads_q),
          .heads_kv = whole(problem.heads_kv),
          .group = whole(call.group()),
          .splits = splits,
          .length_q = whole(problem.length_q),
          .length_k = whole(problem.length_k),
          .dim_qk = whole(problem.dim_qk),
          .dim_v = whole(problem.dim_v),
          .left = call.band.left,
          .right = call.band.right,
          .bottom_right = call.alignment == Alignment::bottom_right,
          .key_lengths = call.key_lengths,
          .packed = call.packed(),
          .starts_q = call.starts_q(),
          .starts_k = call.starts_k(),
          .own_heads = whole(call.group()) / splits.heads};
}

inline std::int64_t entries_of(const AttentionCall& call) { return call.packed() ? 1 : call.problem.batch; }

inline std::int64_t rows_of_keys(const AttentionCall& call) {
  return call.packed() ? call.total_k : call.problem.length_k;
}

/// Number of tiles of `size` rows per head; see sequence_of().
inline std::int64_t tiles_of(const AttentionCall& call, std::int64_t length, std::int64_t total, int size) {
  return call.packed() ? total / size + call.problem.batch : (length + size - 1) / size;
}

inline Splits splits_of(const AttentionProblem& problem, const Config& c) {
  return splits_of(problem, c, device_properties(problem.device.index).multiprocessors);
}

inline Workspace workspace_of(const AttentionCall& call, const Config& c, const Splits& splits,
                              Arena& arena) {
  Workspace workspace;
  workspace.tiles = static_cast<int>(tiles_of(call, call.problem.length_q, call.total_q, c.queries));
  const std::int64_t tiles = entries_of(call) * call.problem.heads_q * workspace.tiles;
  workspace.lse = arena.take<float>(tiles, c.queries);
  workspace.delta = arena.take<float>(tiles, c.queries);
  if (c.general) workspace.offset = arena.take<float>(tiles, c.queries);
  if (call.dq.wanted) workspace.dq = arena.take<float>(tiles, c.queries, c.dim);
  const bool in_order = call.dq.wanted && call.deterministic;
  if (in_order) {
    workspace.ticket = arena.take<std::uint32_t>(1);
    workspace.added = arena.take<std::uint32_t>(tiles, c.dq_chunks());
  }
  if (splits.count() > 1) {
    const std::int64_t heads = entries_of(call) * call.problem.heads_kv * splits.count();
    const std::int64_t rows = rows_of_keys(call);
    if (call.dk.wanted) workspace.dk = arena.take<float>(heads, rows, call.problem.dim_qk);
    if (call.dv.wanted) workspace.dv = arena.take<float>(heads, rows, call.problem.dim_v);
  }
  return workspace;
}

/// The mask in a form that TMA can read: the mask itself, or memory for a copy whose rows start at multiples
/// of 16 bytes. Dimensions along which the mask is broadcast have extent 1 in the copy.
inline MaskView aligned_mask_of(const AttentionCall& call, const Config& c, Arena& arena) {
  const AttentionProblem& problem = call.problem;
  MaskView mask = call.mask;
  if (!c.general || problem.features.mask == MaskKind::none || problem.aligned_mask) return mask;
  const auto size = static_cast<std::int64_t>(size_of(mask.dtype));
  for (int n = 0; n < 3; ++n) {
    if (mask.stride[n] == 0) mask.extent[n] = 1;
  }
  mask.extent[3] = problem.length_k;
  mask.stride[3] = 1;
  const std::int64_t row_bytes = (problem.length_k * size + 15) / 16 * 16;
  std::int64_t stride = row_bytes / size;
  for (int n = 2; n >= 0; --n) {
    mask.stride[n] = mask.extent[n] == 1 ? 0 : stride;
    stride *= mask.extent[n];
  }
  mask.data = arena.take<std::byte>(mask.extent[0], mask.extent[1], mask.extent[2], row_bytes);
  return mask;
}

inline void align_mask(const AttentionCall& call, MaskView to, const Launch& how) {
  switch (size_of(to.dtype)) {
    case 1: return launch<align_mask_kernel<std::uint8_t>>(how, call.mask, to);
    case 2: return launch<align_mask_kernel<std::uint16_t>>(how, call.mask, to);
    default: return launch<align_mask_kernel<std::uint32_t>>(how, call.mask, to);
  }
}

/// Whether the pair kernels compute the mask's gradient, rather than the tile kernel.
inline bool has_separate_dmask(const AttentionProblem& problem) {
  return problem.features.mask_gradient && (problem.backward.summed_dmask || problem.features.softcap);
}

struct DmaskPlan {
  DmaskJobs jobs{};
  float* partial = nullptr;
};

/// Where dmask has few tiles, several CTAs share each, so that there are a few CTAs per SM.
inline DmaskPlan dmask_plan_of(const AttentionCall& call, const Config& c, int tiles, Arena& arena) {
  DmaskPlan plan;
  const AttentionProblem& problem = call.problem;
  if (!has_separate_dmask(problem)) return plan;
  const std::int64_t(&extent)[4] = call.dmask.extent;
  const auto key_tiles = static_cast<int>((problem.length_k + c.keys - 1) / c.keys);
  plan.jobs = {.batch = static_cast<int>(extent[0]),
               .heads = static_cast<int>(extent[1]),
               .tiles = extent[2] == 1 ? 1 : tiles,
               .key_tiles = extent[3] == 1 ? 1 : key_tiles,
               .splits = 1};
  const std::int64_t jobs = plan.jobs.per_split();
  const std::int64_t shared = problem.batch * problem.heads_q * tiles * key_tiles / jobs;
  constexpr int ctas_per_sm = 4;
  const std::int64_t enough = ctas_per_sm * device_properties(problem.device.index).multiprocessors;
  plan.jobs.splits = static_cast<int>(std::clamp<std::int64_t>(enough / jobs, 1, shared));
  if (plan.jobs.splits > 1)
    plan.partial = arena.take<float>(plan.jobs.splits, extent[0], extent[1], extent[2], extent[3]);
  return plan;
}

/// The lists of a block mask. Entries and heads that share lists in the mask share them here.
inline BlockLists block_lists_of(const AttentionCall& call, const Config& c, Arena& arena) {
  BlockLists blocks;
  if (!call.problem.features.block_mask) return blocks;
  const BlockView& view = call.blocks;
  const auto shared = [&](int dim) {
    return view.counts.stride[dim] == 0 && view.indices.stride[dim] == 0 &&
           view.full_counts.stride[dim] == 0 && view.full_indices.stride[dim] == 0 &&
           view.tile_ids.stride[dim] == 0;
  };
  blocks.key_blocks = static_cast<int>(call.key_blocks());
  blocks.query_blocks = static_cast<int>((call.problem.length_q + view.block_q - 1) / view.block_q);
  blocks.keys = static_cast<int>(view.block_k);
  blocks.query_tiles = static_cast<int>((view.block_q + c.queries - 1) / c.queries);
  blocks.key_tiles = static_cast<int>((view.block_k + c.keys - 1) / c.keys);
  const std::int64_t heads = shared(1) ? 1 : call.problem.heads_q;
  const std::int64_t batch = shared(0) ? 1 : call.problem.batch;
  blocks.stride_h = shared(1) ? 0 : blocks.key_blocks;
  blocks.stride_b = shared(0) ? 0 : heads * blocks.key_blocks;
  const std::int64_t rows = batch * heads * blocks.key_blocks;
  blocks.lists = arena.take<int2>(rows, blocks.query_blocks);
  blocks.counts = arena.take<std::int32_t>(rows);
  if (has_separate_dmask(call.problem)) blocks.states = arena.take<std::int32_t>(rows, blocks.query_blocks);
  if (call.dq.wanted && call.deterministic)
    blocks.before = arena.take<std::int32_t>(rows, blocks.query_blocks);
  if (view.tile_ids.data == nullptr || view.tile_count == 0) return blocks;
  blocks.one_row = view.tile_stride[1] == 0;
  blocks.bits = arena.take<std::uint32_t>(view.tile_count, blocks.one_row ? 1 : blocks.query_tiles,
                                          blocks.key_tiles, blocks.bit_words(c));
  return blocks;
}

template <typename Table, int row>
void list_blocks(const AttentionCall& call, const BlockLists& blocks, std::int64_t most_ctas,
                 cudaStream_t stream) {
  constexpr Config c = Table::rows[row];
  const std::int64_t heads = blocks.stride_h == 0 ? 1 : call.problem.heads_q;
  const std::int64_t batch = blocks.stride_b == 0 ? 1 : call.problem.batch;
  const std::int64_t rows = batch * heads * blocks.key_blocks;
  const auto entries = static_cast<std::size_t>(rows * blocks.query_blocks);
  const auto clear = [&](void* data, std::size_t bytes) {
    check_cuda(cudaMemsetAsync(data, 0x80, bytes, stream), "tilewise wgmma backward, blocks");
  };
  clear(blocks.lists, entries * sizeof(int2));
  if (blocks.states != nullptr) clear(blocks.states, entries * sizeof(std::int32_t));
  const auto start = [&](const char* name, std::int64_t warps) {
    return Launch{.name = name,
                  .blocks = (warps * 32 + row_threads - 1) / row_threads,
                  .threads = row_threads,
                  .stream = stream};
  };
  launch<scatter_blocks_kernel<>>(
      start("tilewise wgmma backward, blocks", batch * heads * blocks.query_blocks), call.blocks, blocks,
      static_cast<int>(batch), static_cast<int>(heads));
  if (blocks.before != nullptr) {
    launch<count_blocks_kernel<>>(
        start("tilewise wgmma backward, count blocks", (batch * heads * blocks.query_blocks + 31) / 32),
        blocks, batch * heads);
  }
  if (blocks.bits != nullptr) {
    const std::int64_t words = call.blocks.tile_count * blocks.key_tiles * c.kept_words() *
                               (blocks.one_row ? 1 : blocks.query_tiles * (c.queries / 32));
    launch<block_bits_kernel<Table, row>>(
        start("tilewise wgmma backward, bits", std::min(words, most_ctas * (row_threads / 32))), call.blocks,
        blocks);
  }
  launch<list_blocks_kernel<>>(start("tilewise wgmma backward, lists", rows), blocks, rows);
}

inline FeatureStages stages_of(const Config& c, const AttentionProblem& problem) {
  const MaskKind mask = c.general ? problem.features.mask : MaskKind::none;
  const int element_bytes = mask == MaskKind::none      ? 0
                            : mask == MaskKind::boolean ? 1
                            : problem.f32_mask          ? 4
                                                        : 2;
  return stages_of(c, element_bytes, problem.features.dropout);
}

inline ScoreParams score_of_call(const AttentionCall& call, const Config& c, const MaskView& mask) {
  const AttentionFeatures& features = call.problem.features;
  const FeatureStages stages = stages_of(c, call.problem);
  ScoreParams score{.scale = static_cast<float>(features.softcap ? call.scale / call.softcap : call.scale),
                    .cap = static_cast<float>(features.softcap ? call.softcap : 0),
                    .alibi = features.alibi,
                    .alibi_slopes = call.alibi_slopes,
                    .mask = MaskForm::none,
                    .mask_stages = static_cast<std::uint8_t>(stages.mask),
                    .mask_rows = features.mask != MaskKind::none && mask.stride[2] == 0 ? 8 : 64,
                    .dropout = features.dropout,
                    .kept_stages = stages.kept,
                    .kept = call.dropout,
                    .dmask = {},
                    .blocks = {}};
  if (!c.general) return score;
  if (features.mask == MaskKind::boolean) score.mask = MaskForm::boolean;
  if (features.mask == MaskKind::additive) {
    score.mask = call.mask.dtype == DType::f32 ? MaskForm::single : MaskForm::half;
  }
  if (features.mask_gradient && !has_separate_dmask(call.problem)) {
    score.dmask = {.data = call.dmask.data, .dtype = call.dmask.dtype, .stride = {}};
    const auto size = static_cast<std::int64_t>(size_of(call.dmask.dtype));
    for (int n = 0; n < 4; ++n) score.dmask.stride[n] = call.dmask.stride[n] * size;
  }
  return score;
}

template <typename T, typename Table, int row, PairSum sum>
void run_pairs(const char* name, std::int64_t blocks, const PairParams& params, cudaStream_t stream) {
  constexpr Config c = pair_config(Table::rows[row]);
  const ScoreParams& score = params.tile.score;
  launch<pair_kernel<T, Table, row, sum>>(
      {.name = name,
       .blocks = blocks,
       .threads = c.threads(),
       .shared_bytes = PairShared<c>::bytes(score.mask_bytes(c), score.dropout),
       .stream = stream,
       .early = true},
      params);
}

template <typename T, typename Table, int row>
void run(const AttentionCall& call, const Splits& splits, const Context& context) {
  constexpr Config c = Table::rows[row];
  const AttentionProblem& problem = call.problem;
  const AttentionFeatures& features = problem.features;
  Arena arena(context.workspace.data);
  const Workspace workspace = workspace_of(call, c, splits, arena);
  const BlockLists blocks = block_lists_of(call, c, arena);
  const DmaskPlan dmask = dmask_plan_of(call, c, workspace.tiles, arena);
  const MaskView mask = aligned_mask_of(call, c, arena);
  const Sizes sizes = sizes_of(call, splits);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const std::int64_t query_tiles = entries_of(call) * problem.heads_q * workspace.tiles;
  const auto scale = static_cast<float>(call.scale);
  const auto start = [&](const char* name, std::int64_t blocks) {
    return Launch{.name = name, .blocks = blocks, .threads = row_threads, .stream = stream, .early = true};
  };
  const std::int64_t most_ctas = 16 * std::int64_t{multiprocessors};
  const std::int64_t(&extent)[4] = call.dmask.extent;
  const std::int64_t dmask_elements = extent[0] * extent[1] * extent[2] * extent[3];

  if constexpr (c.listed) list_blocks<Table, row>(call, blocks, most_ctas, stream);
  if constexpr (c.general) {
    if (features.mask != MaskKind::none && !problem.aligned_mask) {
      const std::int64_t chunks =
          mask.extent[0] * mask.extent[1] * mask.extent[2] *
          ((problem.length_k * static_cast<std::int64_t>(size_of(mask.dtype)) + 15) / 16);
      align_mask(call, mask,
                 start("tilewise wgmma backward, align mask",
                       std::min((chunks + row_threads - 1) / row_threads, most_ctas)));
    }
    if (features.mask_gradient && !has_separate_dmask(problem)) {
      launch<clear_dmask_kernel<>>(
          start("tilewise wgmma backward, clear dmask",
                std::min((dmask_elements + row_threads - 1) / row_threads, most_ctas)),
          call.dmask);
    }
  }
  launch<delta_kernel<T, Table, row>>(
      start("tilewise wgmma backward, delta", std::min(query_tiles, most_ctas)),
      DeltaParams{.sizes = sizes,
                  .o = call.o,
                  .d_o = call.d_o,
                  .lse = call.lse,
                  .d_lse = call.d_lse,
                  .delta = call.delta,
                  .workspace = workspace,
                  .score_scale = exponent_unit(scale) / log2e});
  if constexpr (c.general) {
    if (features.mask == MaskKind::additive || features.alibi) {
      launch<far_rows_kernel<T, Table, row>>(
          start("tilewise wgmma backward, far rows", query_tiles * c.queries * 32 / row_threads), call, sizes,
          workspace);
    }
  }

  const std::int64_t heads = entries_of(call) * problem.heads_kv * splits.count();
  const std::int64_t key_tiles = tiles_of(call, problem.length_k, call.total_k, c.keys);
  const std::int64_t head_bytes =
      call.group() * problem.length_q * (6 * problem.dim_qk + 2 * problem.dim_v) / splits.count();
  const std::int64_t rows_q = call.packed() ? call.total_q : problem.length_q;
  const std::int64_t rows_k = rows_of_keys(call);
  const auto split_rows = [&](const Rows& of, float* data, std::int64_t dims) {
    if (splits.count() == 1 || !of.wanted) return of;
    return Rows{.data = reinterpret_cast<std::byte*>(data),
                .dtype = DType::f32,
                .stride_b = problem.heads_kv * splits.count() * rows_k * dims,
                .stride_h = rows_k * dims,
                .stride_s = dims,
                .wanted = true};
  };
  const auto map_queries = [&](const Rows& of, std::int64_t dim) {
    return map_of(of, entries_of(call), problem.heads_q, rows_q, dim, c.queries);
  };
  const auto map_keys = [&](const Rows& of, std::int64_t dim) {
    return map_of(of, entries_of(call), problem.heads_kv, rows_k, dim, c.keys);
  };
  TileParams params{.q = map_queries(call.q, problem.dim_qk),
                    .k = map_keys(call.k, problem.dim_qk),
                    .v = map_keys(call.v, problem.dim_v),
                    .d_o = map_queries(call.d_o, problem.dim_v),
                    .mask = {},
                    .sizes = sizes,
                    .key_mask = {},
                    .k_rows = call.k,
                    .v_rows = call.v,
                    .dk = split_rows(call.dk, workspace.dk, problem.dim_qk),
                    .dv = split_rows(call.dv, workspace.dv, problem.dim_v),
                    .workspace = workspace,
                    .turns = Turns::of(call, heads, key_tiles, head_bytes, multiprocessors),
                    .scale = scale,
                    .dv_scale = features.dropout ? call.dropout.keep_scale : 1.0f,
                    .wants_dq = call.dq.wanted,
                    .score = {}};
  if constexpr (!c.general) {
    if (features.mask != MaskKind::none)
      params.key_mask = {call.mask.data, call.mask.stride[0], call.mask.stride[3]};
  }
  std::size_t shared_bytes = c.shared_bytes();
  if constexpr (c.published() || c.drops) {
    params.score = score_of_call(call, c, mask);
    const ScoreParams& score = params.score;
    params.score.blocks = blocks;
    if (score.mask != MaskForm::none) params.mask = map_of_mask(mask, problem, score.mask_rows, 128);
    shared_bytes =
        c.shared_bytes(score.mask_stages * (score.mask_bytes(c) + c.seen_bytes()), score.kept_stages);
  }
  PairParams pairs{};
  if constexpr (c.general) {
    if (has_separate_dmask(problem)) {
      pairs = {.tile = params,
               .sinks = features.sinks ? call.sinks : HeadValues{},
               .d_lse = call.d_lse,
               .dmask = call.dmask,
               .partial = dmask.partial,
               .reloads_mask = true,
               .jobs = dmask.jobs};
      if (problem.backward.summed_dmask) {
        run_pairs<T, Table, row, PairSum::delta>("tilewise wgmma backward, pairs' delta", query_tiles, pairs,
                                                 stream);
      }
    }
  }
  launch<tile_kernel<T, Table, row>>({.name = "tilewise wgmma backward, tiles",
                                      .blocks = heads * key_tiles,
                                      .threads = c.threads(),
                                      .shared_bytes = shared_bytes,
                                      .stream = stream,
                                      .early = true},
                                     params);

  if (splits.count() > 1) {
    const std::int64_t joined = entries_of(call) * problem.heads_kv;
    const std::int64_t chunks = joined * rows_k * (problem.dim_qk + problem.dim_v) / 8;
    launch<join_splits_kernel<>>(start("tilewise wgmma backward, join splits",
                                       std::min((chunks + row_threads - 1) / row_threads, most_ctas)),
                                 JoinParams{.heads = joined,
                                            .rows = rows_k,
                                            .heads_kv = sizes.heads_kv,
                                            .splits = splits.count(),
                                            .dim_qk = sizes.dim_qk,
                                            .dim_v = sizes.dim_v,
                                            .dk = call.dk,
                                            .dv = call.dv,
                                            .split_dk = workspace.dk,
                                            .split_dv = workspace.dv});
  }
  if (call.dq.wanted) {
    launch<dq_kernel<T, Table, row>>(start("tilewise wgmma backward, dq", query_tiles),
                                     DqParams{sizes, call.dq, workspace, scale});
  }
  if constexpr (c.general) {
    if (has_separate_dmask(problem)) {
      // All pairs of a tile of dmask use the same part of the mask, unless queries or keys share elements.
      pairs.reloads_mask = extent[2] == 1 || extent[3] == 1;
      run_pairs<T, Table, row, PairSum::dmask>("tilewise wgmma backward, pairs' dmask",
                                               std::int64_t{dmask.jobs.per_split()} * dmask.jobs.splits,
                                               pairs, stream);
      if (dmask.partial != nullptr) {
        launch<join_dmask_kernel<>>(
            start("tilewise wgmma backward, join dmask",
                  std::min((dmask_elements + row_threads - 1) / row_threads, most_ctas)),
            call.dmask, dmask.partial, dmask.jobs.splits);
      }
    }
  }
  if (call.dsinks != nullptr) {
    launch<sink_kernel<Table, row>>(
        start("tilewise wgmma backward, sinks", problem.heads_q),
        SinkParams{sizes, exponent_unit(scale), call.sinks, reinterpret_cast<float*>(call.dsinks),
                   call.dsinks_stride, workspace});
  }
  if (call.packed()) simt::clear_unused_gradients(call, stream);
}

template <typename Table>
std::size_t workspace_bytes(const AttentionCall& call) {
  Arena arena(nullptr);
  const Config& c = Table::rows[row_of<Table>(call.problem)];
  const Workspace workspace = workspace_of(call, c, splits_of(call.problem, c), arena);
  block_lists_of(call, c, arena);
  dmask_plan_of(call, c, workspace.tiles, arena);
  aligned_mask_of(call, c, arena);
  return arena.used();
}

template <typename Table>
void run_in(const AttentionCall& call, const Context& context) {
  with_row<Table>(row_of<Table>(call.problem), [&](auto row) {
    const Splits splits = splits_of(call.problem, Table::rows[row]);
    call.problem.dtype == DType::f16 ? run<__half, Table, row>(call, splits, context)
                                     : run<__nv_bfloat16, Table, row>(call, splits, context);
  });
}

}  // namespace tilewise::cuda::wgmma_backward
