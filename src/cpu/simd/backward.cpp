#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/backward.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include "cpu/simd/gradient_tile-inl.h"
#include "cpu/simd/mask_gradient-inl.h"
#include "cpu/simd/passes.h"
#include "cpu/unused_rows.h"

// Attention backward. For each panel of queries (one query per lane):
//
//   softmax_of_panel:    S = K·Qᵀ and its maxima, then dP = V·dOᵀ, exp(S − maximum) and the row statistics
//   for each key tile:   P and dS
//                        dV += P·dO, dK += dS·Q, dQᵀ += Kᵀ·dS
//
// where P, dP, S and dS are [keys, queries]. Then the splits of dK and dV are added, and dmask, dsinks and
// dlogit_scale are computed from the row statistics.

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

// How the work is divided. A task is (b, key head, split). The panels of queries that share a key head are
// dealt to its splits in turn. Each split sums its own dK and dV, so that no two tasks write the same memory.
// At the end the splits are added in a fixed order.
struct Partition {
  PanelGrid grid;
  int width;
  int keys;  // per tile
  std::int64_t splits;

  explicit Partition(const AttentionCall& call)
      : grid(call, panel_width(choice_length_q(call.problem), lanes), false),
        width(panel_width(choice_length_q(call.problem), lanes)),
        keys(tile_keys(std::max(call.problem.dim_qk, call.problem.dim_v))),
        splits(choosing_by(call, [&](const AttentionCall& asked) {
          const PanelGrid usual(asked, width, false);
          return gradient_splits(asked.problem.batch * asked.problem.heads_kv, usual.panels() * call.group());
        })) {}
};

struct Scratch {
  GradientScratch tile;
  float* q_rows;    // [width, padded D]
  float* d_o_rows;  // [width, padded Dv]
  float* dq;        // [D, width]
};

struct Workspace {
  RowStatistics rows;
  float* dk;  // [splits, Hkv, rows_k, padded D]
  float* dv;  // [splits, Hkv, rows_k, padded Dv]
  std::byte* workers;
};

Scratch take_scratch(Arena& arena, const AttentionCall& call, const Partition& partition) {
  return {.tile = take_gradient_scratch(arena, call, partition.width, call.problem.length_k, partition.keys),
          .q_rows = arena.take<float>(partition.width * padded(call.problem.dim_qk)),
          .d_o_rows = arena.take<float>(partition.width * padded(call.problem.dim_v)),
          .dq = arena.take<float>(partition.width * call.problem.dim_qk)};
}

// A worker computes panels first and blocks of dmask later, in the same memory.
std::size_t worker_bytes(const AttentionCall& call, const Partition& partition) {
  Arena panels(nullptr);
  Arena mask(nullptr);
  take_scratch(panels, call, partition);
  if (call.problem.features.mask_gradient) take_mask_scratch(mask, call, partition.width, partition.keys);
  return (std::max(panels.used(), mask.used()) + 63) / 64 * 64;
}

// The number of tasks of the larger of the two passes: over key heads, or over blocks of dmask.
std::int64_t tasks_of(const AttentionCall& call, const Partition& partition) {
  const std::int64_t heads = call.problem.batch * call.problem.heads_kv * partition.splits;
  return std::max(heads,
                  call.problem.features.mask_gradient ? mask_tasks(call, partition.grid, partition.keys) : 0);
}

Workspace take_workspace(Arena& arena, const AttentionCall& call, const Partition& partition,
                         const Context& context) {
  const std::int64_t rows = call.problem.heads_q * call.rows_q();
  const std::int64_t key_rows = partition.splits * call.problem.heads_kv * call.rows_k();
  return {.rows = {arena.take<float>(rows), arena.take<double>(rows), arena.take<double>(rows),
                   arena.take<double>(rows), arena.take<double>(call.dlogit_scale != nullptr ? rows : 0)},
          .dk = arena.take<float>(call.dk.wanted ? key_rows : 0, padded(call.problem.dim_qk)),
          .dv = arena.take<float>(call.dv.wanted ? key_rows : 0, padded(call.problem.dim_v)),
          .workers = arena.take<std::byte>(worker_bytes(call, partition),
                                           workers_for(context.parallel_for, tasks_of(call, partition)))};
}

// Loads the panel's rows as f32 without transposing them, times factor(lane): [width, padded dim], padded
// with zeros.
template <typename Factor>
void load_rows(const Panel& panel, const Rows& rows, std::int64_t dim, float* to, const Factor& factor) {
  const std::int64_t stride = padded(dim);
  for (int lane = 0; lane < panel.rows; ++lane) {
    float* row = to + lane * stride;
    widen(row, rows.at(panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]), rows.dtype,
          static_cast<int>(dim), factor(lane));
    std::fill_n(row + dim, stride - dim, 0.0f);
  }
}

// The term of each row in the gradient of its head's logit scale l: Σ_j dS_j·scale·q·k_j = scale·q·Σ_j
// dS_j·k_j. That is q·dq, before dq is multiplied by l.
void sum_logit_rows(const AttentionCall& call, const Panel& panel, const Scratch& scratch,
                    const RowStatistics& statistics) {
  const std::int64_t dim = call.problem.dim_qk;
  const std::int64_t stride = padded(dim);
  load_rows(panel, call.q, dim, scratch.q_rows, [](int) { return 1.0f; });
  for (int lane = 0; lane < panel.rows; ++lane) {
    double sum = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
      sum += static_cast<double>(scratch.q_rows[lane * stride + d]) *
             static_cast<double>(scratch.dq[d * panel.width + lane]);
    }
    const std::int64_t row = panel.head[lane] * call.rows_q() + call.first_row_q(panel.b) + panel.query[lane];
    statistics.dlogit_scale[row] = call.scale * sum;
  }
}

void write_dq(const AttentionCall& call, const Panel& panel, const Scratch& scratch) {
  const auto dim = static_cast<int>(call.problem.dim_qk);
  scale_by_head(call, panel, dim, scratch.dq);
  const VF scale = set(static_cast<float>(call.scale));
  map_tile(scratch.dq, dim, panel.width, [&](int, int, VF dq) HWY_ATTR { return hn::Mul(dq, scale); });
  panel_to_rows(scratch.dq, panel.width, dim, panel.rows, call.dq.dtype, scratch.tile.score.staging,
                [&](int lane) {
                  return call.dq.at(panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]);
                });
}

// Completes a tile that softmax_of_panel began: P after dropout from the signed exp(S − maximum), and dS from
// dP.
void finish_p_and_ds(const AttentionCall& call, const Panel& panel, const KeyTile& tile,
                     const Scratch& scratch) {
  const int width = panel.width;
  const std::int64_t at = strip_offset(panel, tile);
  float* ds_tile = scratch.tile.ds + at;
  const VF keep_scale = set(call.dropout.keep_scale);
  const bool dropout = call.problem.features.dropout;
  map_tile(scratch.tile.p + at, tile.count, width, [&](int j, int lane, VF exp_s) HWY_ATTR {
    const VF p = hn::Mul(hn::Abs(exp_s), load(scratch.tile.inverse_sum + lane));
    float* ds = ds_tile + j * width + lane;
    store(hn::Mul(p, hn::Add(load(ds), load(scratch.tile.dlse_minus_delta + lane))), ds);
    return dropout ? hn::IfNegativeThenElse(exp_s, hn::Zero(F()), hn::Mul(p, keep_scale)) : p;
  });
  if (call.problem.features.softcap) {  // through s = c·tanh(x): ds/dx = 1 − tanh²
    map_tile(ds_tile, tile.count, width, [&](int j, int lane, VF ds) HWY_ATTR {
      const VF t = load(scratch.tile.score.tanh_values + at + j * width + lane);
      return hn::Mul(ds, hn::NegMulAdd(t, t, set(1.0f)));
    });
  }
}

// All gradients of one panel. Writes the statistics and dQ of its rows, and adds to dK and dV, which are
// [keys, padded dim] of this batch entry and key head.
void backward_panel(const AttentionCall& call, const Partition& partition, const Panel& panel,
                    const Scratch& scratch, const RowStatistics& statistics, float* dk, float* dv) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const std::int64_t stride_k = padded(call.problem.dim_qk);
  const std::int64_t stride_v = padded(call.problem.dim_v);
  const int width = panel.width;
  load_panel(call, panel, scratch.tile);
  softmax_of_panel(call, panel, partition.keys, scratch.tile, statistics);
  if (!call.dq.wanted && !call.dk.wanted && !call.dv.wanted) return;
  load_statistics(call, panel, statistics, scratch.tile);
  if (call.dk.wanted) {
    load_rows(panel, call.q, call.problem.dim_qk, scratch.q_rows,
              [&](int lane) { return logit_scale_of(call, panel, lane); });
  }
  if (call.dv.wanted) {
    load_rows(panel, call.d_o, call.problem.dim_v, scratch.d_o_rows, [](int) { return 1.0f; });
  }
  std::fill_n(scratch.dq, dim_qk * width, 0.0f);
  for_each_key_tile(call, panel, panel.any, partition.keys, [&](const KeyTile& tile) {
    const std::int64_t at = strip_offset(panel, tile);
    finish_p_and_ds(call, panel, tile, scratch);
    if (call.dv.wanted) {
      multiply<ALayout::rows, Into::add>({.a = scratch.tile.p + at,
                                          .lda = width,
                                          .b = scratch.d_o_rows,
                                          .ldb = stride_v,
                                          .c = dv + tile.first * stride_v,
                                          .ldc = stride_v,
                                          .depth = panel.rows},
                                         tile.count, static_cast<int>(stride_v));
    }
    if (call.dk.wanted) {
      multiply<ALayout::rows, Into::add>({.a = scratch.tile.ds + at,
                                          .lda = width,
                                          .b = scratch.q_rows,
                                          .ldb = stride_k,
                                          .c = dk + tile.first * stride_k,
                                          .ldc = stride_k,
                                          .depth = panel.rows},
                                         tile.count, static_cast<int>(stride_k));
    }
    if (call.dq.wanted) {
      const RowBlock k = load_key_rows(call, panel, call.k, tile, dim_qk, scratch.tile.k_rows);
      multiply<ALayout::columns, Into::add>({.a = k.data,
                                             .lda = k.stride,
                                             .b = scratch.tile.ds + at,
                                             .ldb = width,
                                             .c = scratch.dq,
                                             .ldc = width,
                                             .depth = tile.count},
                                            dim_qk, width);
    }
  });
  if (call.dlogit_scale != nullptr) sum_logit_rows(call, panel, scratch, statistics);
  if (call.dq.wanted) write_dq(call, panel, scratch);
}

// Writes the gradient of one key, factor · Σ over the splits.
void write_key_row(const AttentionCall& call, const Partition& partition, const Rows& to,
                   const float* splits_of, std::int64_t dim, float factor, std::int64_t b, std::int64_t h_kv,
                   std::int64_t j, float* staging) {
  const std::int64_t stride = padded(dim);
  const std::int64_t row = h_kv * call.rows_k() + call.first_row_k(b) + j;
  const std::int64_t split_stride = call.problem.heads_kv * call.rows_k() * stride;
  const float* split_row = splits_of + row * stride;
  for (std::int64_t d = 0; d < stride; d += lanes) {
    VF sum = load(split_row + d);
    for (std::int64_t split = 1; split < partition.splits; ++split) {
      sum = hn::Add(sum, load(split_row + split * split_stride + d));
    }
    store(hn::Mul(sum, set(factor)), staging + d);
  }
  narrow(call.key_row(to, call.sequence(b), b, h_kv, j), to.dtype, staging, static_cast<int>(dim));
}

void sink_gradient(const AttentionCall& call, const RowStatistics& statistics) {
  for (std::int64_t h = 0; h < call.problem.heads_q; ++h) {
    double sum = 0;
    for (std::int64_t b = 0; b < call.problem.batch; ++b) {
      const Sequence sequence = call.sequence(b);
      const RowStatistics rows = statistics + (h * call.rows_q() + call.first_row_q(b));
      for (std::int64_t i = 0; i < sequence.length_q; ++i) {
        const double sink = exp_of_sink(call, b, h, rows.maximum[i]);
        if (sink != 0) sum += sink * rows.inverse_sum[i] * rows.dlse_minus_delta[i];
      }
    }
    store_element(call.dsinks, call.sinks.dtype, h * call.dsinks_stride, sum);
  }
}

void logit_scale_gradient(const AttentionCall& call, const RowStatistics& statistics) {
  for (std::int64_t h = 0; h < call.problem.heads_q; ++h) {
    double sum = 0;
    for (std::int64_t b = 0; b < call.problem.batch; ++b) {
      const double* rows = statistics.dlogit_scale + h * call.rows_q() + call.first_row_q(b);
      for (std::int64_t i = 0; i < call.sequence(b).length_q; ++i) sum += rows[i];
    }
    store_element(call.dlogit_scale, call.logit_scale.dtype, h * call.dlogit_scale_stride, sum);
  }
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call, const Context& context) {
  Arena arena(nullptr);
  take_workspace(arena, call, Partition(call), context);
  return arena.used();
}

void backward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Partition partition(call);
  Arena arena(context.workspace.data);
  const Workspace workspace = take_workspace(arena, call, partition, context);
  const std::size_t stride = worker_bytes(call, partition);
  const auto worker_arena = [&](std::int64_t worker) {
    return Arena(workspace.workers + stride * static_cast<std::size_t>(worker));
  };

  const std::int64_t panels = partition.grid.panels();
  for_each_task(context.parallel_for, problem.batch * problem.heads_kv * partition.splits,
                [&](std::int64_t worker, std::int64_t task) {
                  Arena own = worker_arena(worker);
                  const Scratch scratch = take_scratch(own, call, partition);
                  const std::int64_t split = task % partition.splits;
                  const std::int64_t h_kv = task / partition.splits % problem.heads_kv;
                  const std::int64_t b = task / partition.splits / problem.heads_kv;
                  const std::int64_t row =
                      (split * problem.heads_kv + h_kv) * call.rows_k() + call.first_row_k(b);
                  const std::int64_t length = call.sequence(b).length_k;
                  float* dk = workspace.dk + row * padded(problem.dim_qk);
                  float* dv = workspace.dv + row * padded(problem.dim_v);
                  if (call.dk.wanted) std::fill_n(dk, length * padded(problem.dim_qk), 0.0f);
                  if (call.dv.wanted) std::fill_n(dv, length * padded(problem.dim_v), 0.0f);
                  for (std::int64_t unit = split; unit < call.group() * panels; unit += partition.splits) {
                    const std::int64_t head = h_kv * call.group() + unit / panels;
                    if (!fill_panel(call, partition.grid, b, head, unit % panels, scratch.tile)) continue;
                    backward_panel(call, partition, *scratch.tile.panel, scratch, workspace.rows, dk, dv);
                  }
                });

  if (call.dk.wanted || call.dv.wanted) {
    for_each_task(context.parallel_for, problem.batch * problem.heads_kv,
                  [&](std::int64_t worker, std::int64_t task) {
                    Arena own = worker_arena(worker);
                    const Scratch scratch = take_scratch(own, call, partition);
                    const std::int64_t b = task / problem.heads_kv;
                    const std::int64_t h_kv = task % problem.heads_kv;
                    for (std::int64_t j = 0; j < call.sequence(b).length_k; ++j) {
                      if (call.dk.wanted) {
                        write_key_row(call, partition, call.dk, workspace.dk, problem.dim_qk,
                                      static_cast<float>(call.scale), b, h_kv, j, scratch.q_rows);
                      }
                      if (call.dv.wanted) {
                        write_key_row(call, partition, call.dv, workspace.dv, problem.dim_v, 1.0f, b, h_kv, j,
                                      scratch.d_o_rows);
                      }
                    }
                  });
  }
  clear_unused_gradients(call);
  if (problem.features.mask_gradient) {
    mask_gradient(call, context, partition.grid, partition.keys, workspace.rows, [&](std::int64_t worker) {
      Arena own = worker_arena(worker);
      return take_mask_scratch(own, call, partition.width, partition.keys);
    });
  }
  if (call.dsinks != nullptr) sink_gradient(call, workspace.rows);
  if (call.dlogit_scale != nullptr) logit_scale_gradient(call, workspace.rows);
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
