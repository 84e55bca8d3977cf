#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/forward.cpp"
#include "hwy/foreach_target.h"  // compiles this file once for each target
//
#include <cmath>

#include "core/arena.h"
#include "core/load.h"
#include "core/parallel.h"
#include "cpu/simd/dropout-inl.h"
#include "cpu/simd/few_queries-inl.h"
#include "cpu/simd/multiply-inl.h"
#include "cpu/simd/panel.h"
#include "cpu/simd/passes.h"
#include "cpu/simd/score-inl.h"
#include "cpu/simd/softmax-inl.h"
#include "cpu/simd/tuning.h"
#include "cpu/unused_rows.h"

// Attention forward. A panel is up to three vectors of queries, one query per lane. A task computes one
// panel, or one split of its keys:
//
//   for each key tile:   S = K·Qᵀ, [keys, queries]
//                        P in place of S: score rules, online softmax, dropout
//                        Oᵀ = Oᵀ·rescale + Vᵀ·P
//   at the end:          O / sum, LSE
//
// For panels of few queries, vectors run along the head dim instead: few_queries-inl.h.

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {
namespace {

// The buffers in which a worker computes a panel.
struct Scratch {
  Panel* panel;
  float* q;        // [D, width]: transposed and multiplied by the scale
  float* q_rows;   // [max_few_queries, padded D]: the same, not transposed, for panels of few queries
  float* o_rows;   // [max_few_queries, padded Dv]
  float* o;        // [Dv, width]: the unnormalised output, transposed
  float* scores;   // [tile keys, width]: S, then P
  float* kv_rows;  // [tile keys, max(D, Dv)]: rows of K or V that are paged or not f32
  ScoreScratch score;
  std::int32_t* block_states;
  SoftmaxState* state;
};

// A panel's result over one split of the keys, kept until all splits are computed.
struct Partial {
  SoftmaxState state;
  // O [Dv, width] follows.
};

// How the work is divided: into panels of queries and, if these are few, splits of their keys (split-KV).
struct Partition {
  PanelGrid grid;
  int width;
  int keys;  // per tile
  std::int64_t splits;

  explicit Partition(const AttentionCall& call)
      : grid(call, width_of(call), shares_heads(call)),
        width(width_of(call)),
        keys(tile_keys(std::max(call.problem.dim_qk, call.problem.dim_v))),
        splits(choosing_by(call, [&](const AttentionCall& asked) {
          const PanelGrid usual(asked, width, shares_heads(call));
          return key_splits(asked.problem.batch * usual.heads() * usual.panels(), asked.problem.length_k);
        })) {}

  /// Whether the heads of a group may share panels if they have few queries.
  static bool shares_heads(const AttentionCall& call) {
    return choice_length_q(call.problem) < panel_vectors * lanes && !call.problem.features.block_mask;
  }
  static int width_of(const AttentionCall& call) {
    return panel_width(choice_length_q(call.problem) * (shares_heads(call) ? call.group() : 1), lanes);
  }

  std::int64_t panels(const AttentionCall& call) const {
    return call.problem.batch * grid.heads() * grid.panels();
  }
  std::int64_t partial_floats(const AttentionCall& call) const {
    const std::int64_t floats =
        static_cast<std::int64_t>(sizeof(Partial) / sizeof(float)) + call.problem.dim_v * width;
    return (floats + 15) / 16 * 16;  // so that the next one is aligned, too
  }
};

Scratch take_scratch(Arena& arena, const AttentionCall& call, const Partition& partition) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const std::int64_t tile = std::int64_t{partition.keys} * partition.width;
  const bool blocks = call.problem.features.block_mask;
  const bool converts = call.problem.dtype != DType::f32 || call.problem.layout == Layout::paged;
  return {.panel = arena.take<Panel>(1),
          .q = arena.take<float>(call.problem.dim_qk * partition.width),
          .q_rows = arena.take<float>(max_few_queries * padded(call.problem.dim_qk)),
          .o_rows = arena.take<float>(max_few_queries * padded(call.problem.dim_v)),
          .o = arena.take<float>(call.problem.dim_v * partition.width),
          .scores = arena.take<float>(tile),
          .kv_rows = arena.take<float>(converts ? partition.keys * dim : 0),
          .score = {.bias = arena.take<float>(tile),
                    .staging = arena.take<float>(staging_floats(dim, partition.keys)),
                    .tanh_values = nullptr},
          .block_states = arena.take<std::int32_t>(blocks ? call.key_blocks() : 0),
          .state = arena.take<SoftmaxState>(1)};
}

struct Workspace {
  std::byte* workers;  // the scratch of all workers
  std::size_t stride;  // bytes of scratch per worker
  float* partials;     // [panels, splits, partial floats]; unused without split-KV
};

Workspace take_workspace(Arena& arena, const AttentionCall& call, const Partition& partition,
                         const Context& context) {
  Arena own(nullptr);
  take_scratch(own, call, partition);
  const std::int64_t tasks = partition.panels(call) * partition.splits;
  return {.workers = arena.take<std::byte>(own.rounded(), workers_for(context.parallel_for, tasks)),
          .stride = own.rounded(),
          .partials = arena.take<float>(partition.splits > 1 ? tasks : 0, partition.partial_floats(call))};
}

std::byte* query_row(const Rows& rows, const Panel& panel, int lane) {
  return rows.at(panel.b, panel.head[lane], panel.sequence.first_q + panel.query[lane]);
}

// Turns the scores of a tile into P: score rules, online softmax and dropout.
void scores_to_p(const AttentionCall& call, const Panel& panel, const KeyTile& tile, const Scratch& scratch,
                 float* rescale) {
  score_tile(call, panel, tile, scratch.scores, scratch.score);
  softmax_tile(scratch.scores, tile.count, panel.width, *scratch.state, rescale);
  if (!call.problem.features.dropout) return;
  for_each_dropout_factor(call, panel, tile, [&](int j, int lane, VF factor) HWY_ATTR {
    float* p = scratch.scores + j * panel.width + lane;
    store(hn::Mul(load(p), factor), p);
  });
}

// Attends from the panel to the keys of `range`. Leaves the unnormalised O and the softmax state in the
// scratch.
void attend_many_queries(const AttentionCall& call, const Partition& partition, const Panel& panel,
                         KeyRange range, const Scratch& scratch) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  const int width = panel.width;
  alignas(64) float rescale[max_panel_width];
  std::fill_n(scratch.o, dim_v * width, 0.0f);
  rows_to_panel(scratch.q, width, dim_qk, call.q.dtype, static_cast<float>(call.scale), scratch.score.staging,
                [&](int lane) { return query_row(call.q, panel, lane); });
  scale_by_head(call, panel, dim_qk, scratch.q);
  for_each_key_tile(call, panel, range, partition.keys, [&](const KeyTile& tile) {
    const RowBlock k = load_key_rows(call, panel, call.k, tile, dim_qk, scratch.kv_rows);
    multiply_in_chunks({.a = k.data,
                        .lda = k.stride,
                        .b = scratch.q,
                        .ldb = width,
                        .c = scratch.scores,
                        .ldc = width,
                        .depth = dim_qk},
                       tile.count, width, panel.sequence.length_q);
    scores_to_p(call, panel, tile, scratch, rescale);
    const RowBlock v = load_key_rows(call, panel, call.v, tile, dim_v, scratch.kv_rows);
    multiply<ALayout::columns, Into::rescale>({.a = v.data,
                                               .lda = v.stride,
                                               .b = scratch.scores,
                                               .ldb = width,
                                               .c = scratch.o,
                                               .ldc = width,
                                               .depth = tile.count,
                                               .factor = rescale},
                                              dim_v, width);
  });
}

// The same for few queries, with vectors that run along the head dim.
void attend_few_queries(const AttentionCall& call, const Partition& partition, const Panel& panel,
                        KeyRange range, const Scratch& scratch) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  const std::int64_t q_stride = padded(dim_qk);
  const std::int64_t o_stride = padded(dim_v);
  alignas(64) float rescale[max_panel_width];
  std::fill_n(scratch.q_rows, max_few_queries * q_stride, 0.0f);
  std::fill_n(scratch.o_rows, max_few_queries * o_stride, 0.0f);
  const std::int64_t keys = std::min<std::int64_t>(partition.keys, range.last - range.first);
  std::fill_n(scratch.scores, keys * panel.width, 0.0f);  // lanes without a query must be finite
  for (int row = 0; row < panel.rows; ++row) {
    widen(scratch.q_rows + row * q_stride, query_row(call.q, panel, row), call.q.dtype, dim_qk,
          static_cast<float>(call.scale_of(panel.head[row])));
  }
  for_each_key_tile(call, panel, range, partition.keys, [&](const KeyTile& tile) {
    const RowBlock k = load_key_rows(call, panel, call.k, tile, dim_qk, scratch.kv_rows);
    with_row_count(panel.rows, [&](auto rows) HWY_ATTR {
      few_query_scores<rows>(k, tile.count, dim_qk, scratch.q_rows, q_stride, scratch.scores, panel.width);
    });
    scores_to_p(call, panel, tile, scratch, rescale);
    const RowBlock v = load_key_rows(call, panel, call.v, tile, dim_v, scratch.kv_rows);
    with_row_count(panel.rows, [&](auto rows) HWY_ATTR {
      few_query_output<rows>(v, tile.count, dim_v, scratch.scores, panel.width, rescale, scratch.o_rows,
                             o_stride);
    });
  });
  for (int d = 0; d < dim_v; ++d) {
    for (int lane = 0; lane < panel.width; ++lane) {
      scratch.o[d * panel.width + lane] = lane < panel.rows ? scratch.o_rows[lane * o_stride + d] : 0.0f;
    }
  }
}

void attend(const AttentionCall& call, const Partition& partition, const Panel& panel, KeyRange range,
            const Scratch& scratch) {
  scratch.state->reset(panel.width);
  // Backward of a piece computes P from this LSE, so forward must compute the same scores, bit for bit.
  // Vectors along the head dim would sum them in another order.
  if (panel.rows <= max_few_queries && !call.place.of_piece) {
    attend_few_queries(call, partition, panel, range, scratch);
  } else {
    attend_many_queries(call, partition, panel, range, scratch);
  }
}

// Adds the sink, divides O by the sum, and writes O and LSE.
void write_output(const AttentionCall& call, const Panel& panel, Scratch& scratch) {
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  alignas(64) float inverse[max_panel_width];
  for (int lane = 0; lane < panel.width; ++lane) {
    float maximum = scratch.state->maximum[lane];
    float sum = scratch.state->sum[lane];
    float factor = 1;
    if (call.problem.features.sinks) {
      const float sink = static_cast<float>(call.sinks.at(panel.b, panel.head[lane]));
      const float highest = std::max(maximum, sink);
      factor = std::exp(maximum - highest);
      sum = sum * factor + std::exp(sink - highest);
      maximum = highest;
    }
    const bool empty = sum == 0;
    inverse[lane] = empty ? 0.0f : factor / sum;
    if (call.lse.wanted && lane < panel.rows) {
      const double lse = static_cast<double>(maximum) + std::log(static_cast<double>(sum));
      const std::int64_t row = panel.sequence.first_q + panel.query[lane];
      store_element(call.lse.at(panel.b, panel.head[lane], row), call.lse.dtype, 0,
                    empty ? static_cast<double>(minus_infinity) : lse);
    }
  }
  map_tile(scratch.o, dim_v, panel.width,
           [&](int, int lane, VF o) HWY_ATTR { return hn::Mul(o, hn::Load(F(), inverse + lane)); });
  panel_to_rows(scratch.o, panel.width, dim_v, panel.rows, call.o.dtype, scratch.score.staging,
                [&](int lane) { return query_row(call.o, panel, lane); });
}

void save_partial(const AttentionCall& call, const Panel& panel, const Scratch& scratch, float* to) {
  auto* partial = reinterpret_cast<Partial*>(to);
  partial->state = *scratch.state;
  std::copy_n(scratch.o, call.problem.dim_v * panel.width, reinterpret_cast<float*>(partial + 1));
}

// Adds the result of one split to the scratch. Splits are added in order.
void join_partial(const AttentionCall& call, const Panel& panel, Scratch& scratch, const float* from) {
  const auto* partial = reinterpret_cast<const Partial*>(from);
  const auto* o = reinterpret_cast<const float*>(partial + 1);
  for (int lane = 0; lane < panel.width; lane += lanes) {
    const VF ours = hn::Load(F(), scratch.state->maximum + lane);
    const VF theirs = hn::Load(F(), partial->state.maximum + lane);
    const VF maximum = hn::Max(ours, theirs);
    const VF our_factor = exp_of(hn::Sub(ours, maximum));
    const VF their_factor = exp_of(hn::Sub(theirs, maximum));
    const VF their_sum = hn::Mul(hn::Load(F(), partial->state.sum + lane), their_factor);
    hn::Store(hn::MulAdd(hn::Load(F(), scratch.state->sum + lane), our_factor, their_sum), F(),
              scratch.state->sum + lane);
    hn::Store(maximum, F(), scratch.state->maximum + lane);
    for (std::int64_t d = 0; d < call.problem.dim_v; ++d) {
      const std::int64_t at = d * panel.width + lane;
      store(hn::MulAdd(load(scratch.o + at), our_factor, hn::Mul(load(o + at), their_factor)),
            scratch.o + at);
    }
  }
}

struct Task {
  std::int64_t b, head, panel;
};

// Tasks go head by head, and within a head from the last panel to the first: with causal, the last panels see
// the most keys.
Task task_of(const Partition& partition, std::int64_t index) {
  const std::int64_t panels = partition.grid.panels();
  return {.b = index / panels / partition.grid.heads(),
          .head = index / panels % partition.grid.heads(),
          .panel = panels - 1 - index % panels};
}

// The keys of one split: an equal share of the keys that the panel sees, in whole tiles.
KeyRange split_range(const Partition& partition, const Panel& panel, std::int64_t split) {
  const std::int64_t tiles = (panel.any.last - panel.any.first + partition.keys - 1) / partition.keys;
  const auto first_of = [&](std::int64_t index) {
    return panel.any.first + tiles * index / partition.splits * partition.keys;
  };
  return {first_of(split), split + 1 == partition.splits ? panel.any.last : first_of(split + 1)};
}

}  // namespace

std::size_t forward_workspace(const AttentionCall& call, const Context& context) {
  Arena arena(nullptr);
  take_workspace(arena, call, Partition(call), context);
  return arena.used();
}

void forward(const AttentionCall& call, const Context& context) {
  const Partition partition(call);
  Arena arena(context.workspace.data);
  const Workspace workspace = take_workspace(arena, call, partition, context);
  const auto states = [&](const Scratch& scratch) {
    const bool blocks = call.problem.features.block_mask;
    return std::span(scratch.block_states, static_cast<std::size_t>(blocks ? call.key_blocks() : 0));
  };
  const auto worker_scratch = [&](std::int64_t worker) {
    Arena own(workspace.workers + workspace.stride * static_cast<std::size_t>(worker));
    return take_scratch(own, call, partition);
  };

  for_each_task(
      context.parallel_for, partition.panels(call) * partition.splits,
      [&](std::int64_t worker, std::int64_t index) {
        Scratch scratch = worker_scratch(worker);
        const Task task = task_of(partition, index / partition.splits);
        Panel& panel = *scratch.panel;
        if (!partition.grid.fill(panel, task.b, task.head, task.panel, lanes, states(scratch))) return;
        if (partition.splits == 1) {
          attend(call, partition, panel, panel.any, scratch);
          write_output(call, panel, scratch);
        } else {
          attend(call, partition, panel, split_range(partition, panel, index % partition.splits), scratch);
          save_partial(call, panel, scratch, workspace.partials + index * partition.partial_floats(call));
        }
      });
  if (partition.splits > 1) {
    for_each_task(context.parallel_for, partition.panels(call), [&](std::int64_t worker, std::int64_t index) {
      Scratch scratch = worker_scratch(worker);
      const Task task = task_of(partition, index);
      Panel& panel = *scratch.panel;
      if (!partition.grid.fill(panel, task.b, task.head, task.panel, lanes, states(scratch))) return;
      scratch.state->reset(panel.width);
      std::fill_n(scratch.o, call.problem.dim_v * panel.width, 0.0f);
      for (std::int64_t split = 0; split < partition.splits; ++split) {
        join_partial(
            call, panel, scratch,
            workspace.partials + (index * partition.splits + split) * partition.partial_floats(call));
      }
      write_output(call, panel, scratch);
    });
  }
  clear_unused_outputs(call);
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
