#include <algorithm>
#include <limits>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/reference/reference.h"
#include "cpu/reference/softmax.h"
#include "cpu/unused_rows.h"

namespace tilewise::cpu::reference {
namespace {

// The gradients come from the inputs and dO alone: O and LSE, which may be rounded, are not read. A piece has
// only some of a row's keys, so there LSE and delta are read.

// The statistics of one query, in f64. The passes over keys and mask elements read them.
struct RowState {
  Softmax softmax;
  double dlse_minus_delta;  // dLSE − Σ_j p_j·dp_j: dS = P·(dP + dlse_minus_delta)
};

struct Scratch {
  RowState* rows;   // [B, Hq, Sq]
  double* workers;  // [workers, doubles_of_backward_worker]
};

std::int64_t doubles_of_backward_worker(const AttentionProblem& problem) {
  return std::max(2 * problem.length_k + problem.dim_qk, problem.dim_qk + problem.dim_v);
}

Scratch take_scratch(Arena& arena, const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t tasks = problem.batch * std::max(problem.heads_q, problem.heads_kv);
  auto* rows = arena.take<RowState>(problem.batch * problem.heads_q, problem.length_q);
  return {rows,
          arena.take<double>(workers_for(context.parallel_for, tasks), doubles_of_backward_worker(problem))};
}

std::int64_t row_index(const Query& query) {
  const AttentionProblem& problem = query.call.problem;
  return (query.b * problem.heads_q + query.h) * problem.length_q + query.i;
}

// dP of key j: the gradient of P before dropout.
double dp_of(const Query& query, std::int64_t j) {
  const AttentionCall& call = query.call;
  const double factor = query.dropout_factor(j);
  if (factor == 0) return 0;
  return factor * dot(call.v.dtype, query.row(call.d_o), query.key_row(call.v, j), call.problem.dim_v);
}

// P and dS of one query and one key.
struct Pair {
  double p;  // after dropout
  double ds;
};

Pair pair_of(const Query& query, std::int64_t j, const RowState& row) {
  const double p = row.softmax.p(query.score(j));
  if (p == 0) return {0, 0};
  return {p * query.dropout_factor(j), p * (dp_of(query, j) + row.dlse_minus_delta)};
}

// The softmax of a row of a piece, from the LSE of the whole row. An empty row gets P = 0.
Softmax softmax_of_piece(const Query& query, double* scores) {
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) scores[j] = query.score(j);
  const double lse = load_element(query.row(query.call.lse), query.call.lse.dtype, 0);
  if (lse == minus_infinity) return {.maximum = 0, .sum = std::numeric_limits<double>::infinity()};
  return {.maximum = lse, .sum = 1};
}

// Computes the statistics and dQ of one row.
void differentiate_query(const Query& query, RowState& row, double* scratch) {
  const AttentionCall& call = query.call;
  const std::int64_t length = query.sequence.length_k;
  const bool piece = call.delta.wanted;
  double* scores = scratch;
  double* dp = scores + call.problem.length_k;
  double* dq = dp + call.problem.length_k;
  row.softmax = piece ? softmax_of_piece(query, scores) : softmax_row(query, scores);
  row.dlse_minus_delta = call.d_lse.wanted ? load_element(query.row(call.d_lse), call.d_lse.dtype, 0) : 0.0;
  if (piece) row.dlse_minus_delta -= load_element(query.row(call.delta), call.delta.dtype, 0);
  for (std::int64_t j = 0; j < length; ++j) {
    const double p = row.softmax.p(scores[j]);
    dp[j] = p == 0 ? 0.0 : dp_of(query, j);
    if (!piece) row.dlse_minus_delta -= p * dp[j];
  }
  if (!call.dq.wanted) return;
  std::fill_n(dq, call.problem.dim_qk, 0.0);
  for (std::int64_t j = 0; j < length; ++j) {
    const double p = row.softmax.p(scores[j]);
    if (p == 0) continue;
    const double ds = p * (dp[j] + row.dlse_minus_delta) * query.softcap_derivative(j);
    add_scaled(dq, ds, call.k.dtype, query.key_row(call.k, j), call.problem.dim_qk);
  }
  store_row(query.row(call.dq), call.dq.dtype, dq, call.scale_of(query.h), call.problem.dim_qk);
}

// Computes dK and dV of one key, summed over the queries of every head that shares it.
void differentiate_key(const AttentionCall& call, std::int64_t b, std::int64_t h_kv, std::int64_t j,
                       const RowState* rows, double* scratch) {
  const AttentionProblem& problem = call.problem;
  const Sequence sequence = call.sequence(b);
  double* dk = scratch;
  double* dv = dk + problem.dim_qk;
  std::fill_n(dk, problem.dim_qk + problem.dim_v, 0.0);
  for (std::int64_t h = h_kv * call.group(); h < (h_kv + 1) * call.group(); ++h) {
    for (std::int64_t i = 0; i < sequence.length_q; ++i) {
      const Query query{call, b, h, i};
      const Pair pair = pair_of(query, j, rows[row_index(query)]);
      if (pair.p != 0) add_scaled(dv, pair.p, call.d_o.dtype, query.row(call.d_o), problem.dim_v);
      if (pair.ds == 0) continue;
      const double d_scaled_dot = pair.ds * query.softcap_derivative(j);
      add_scaled(dk, d_scaled_dot * call.scale_of(h), call.q.dtype, query.row(call.q), problem.dim_qk);
    }
  }
  if (call.dk.wanted) {
    store_row(call.key_row(call.dk, sequence, b, h_kv, j), call.dk.dtype, dk, 1.0, problem.dim_qk);
  }
  if (call.dv.wanted)
    store_row(call.key_row(call.dv, sequence, b, h_kv, j), call.dv.dtype, dv, 1.0, problem.dim_v);
}

// One element of dmask: the sum of dS over every score to which the mask's element was added.
double mask_element(const AttentionCall& call, const std::int64_t (&index)[4], const RowState* rows) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t whole[4] = {problem.batch, problem.heads_q, problem.length_q, problem.length_k};
  std::int64_t first[4], last[4];
  for (int dim = 0; dim < 4; ++dim) {
    const bool broadcast = call.dmask.extent[dim] == 1;
    first[dim] = broadcast ? 0 : index[dim];
    last[dim] = broadcast ? whole[dim] : index[dim] + 1;
  }
  double sum = 0;
  for (std::int64_t b = first[0]; b < last[0]; ++b) {
    for (std::int64_t h = first[1]; h < last[1]; ++h) {
      for (std::int64_t i = first[2]; i < last[2]; ++i) {
        const Query query{call, b, h, i};
        for (std::int64_t j = first[3]; j < std::min(last[3], query.sequence.length_k); ++j) {
          sum += pair_of(query, j, rows[row_index(query)]).ds;
        }
      }
    }
  }
  return sum;
}

void differentiate_mask(const AttentionCall& call, const Context& context, const RowState* rows) {
  const MaskView& dmask = call.dmask;
  const std::int64_t lines = dmask.extent[0] * dmask.extent[1] * dmask.extent[2];
  for_each_task(context.parallel_for, lines, [&](std::int64_t, std::int64_t line) {
    std::int64_t index[4] = {line / dmask.extent[2] / dmask.extent[1],
                             line / dmask.extent[2] % dmask.extent[1], line % dmask.extent[2], 0};
    for (; index[3] < dmask.extent[3]; ++index[3]) {
      store_element(dmask.at(index[0], index[1], index[2], index[3]), dmask.dtype, 0,
                    mask_element(call, index, rows));
    }
  });
}

void differentiate_sinks(const AttentionCall& call, const RowState* rows) {
  for (std::int64_t h = 0; h < call.problem.heads_q; ++h) {
    double sum = 0;
    for (std::int64_t b = 0; b < call.problem.batch; ++b) {
      for (std::int64_t i = 0; i < call.sequence(b).length_q; ++i) {
        const RowState& row = rows[row_index(Query{call, b, h, i})];
        sum += row.softmax.p(call.sinks.at(b, h)) * row.dlse_minus_delta;
      }
    }
    store_element(call.dsinks, call.sinks.dtype, h * call.dsinks_stride, sum);
  }
}

void differentiate_logit_scale(const AttentionCall& call, const Context& context, const RowState* rows) {
  for_each_task(context.parallel_for, call.problem.heads_q, [&](std::int64_t, std::int64_t h) {
    double sum = 0;
    for (std::int64_t b = 0; b < call.problem.batch; ++b) {
      for (std::int64_t i = 0; i < call.sequence(b).length_q; ++i) {
        const Query query{call, b, h, i};
        for (std::int64_t j = 0; j < query.sequence.length_k; ++j) {
          const double ds = pair_of(query, j, rows[row_index(query)]).ds;
          if (ds != 0) sum += ds * query.softcap_derivative(j) * call.scale * query.dot_with(j);
        }
      }
    }
    store_element(call.dlogit_scale, call.logit_scale.dtype, h * call.dlogit_scale_stride, sum);
  });
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call, const Context& context) {
  Arena arena(nullptr);
  take_scratch(arena, call, context);
  return arena.used();
}

void backward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  Arena arena(context.workspace.data);
  const Scratch scratch = take_scratch(arena, call, context);
  const auto worker_scratch = [&](std::int64_t worker) {
    return scratch.workers + worker * doubles_of_backward_worker(problem);
  };
  for_each_task(context.parallel_for, problem.batch * problem.heads_q,
                [&](std::int64_t worker, std::int64_t task) {
                  const std::int64_t b = task / problem.heads_q;
                  for (std::int64_t i = 0; i < call.sequence(b).length_q; ++i) {
                    const Query query{call, b, task % problem.heads_q, i};
                    differentiate_query(query, scratch.rows[row_index(query)], worker_scratch(worker));
                  }
                });
  for_each_task(
      context.parallel_for, problem.batch * problem.heads_kv, [&](std::int64_t worker, std::int64_t task) {
        const std::int64_t b = task / problem.heads_kv;
        for (std::int64_t j = 0; j < call.sequence(b).length_k; ++j) {
          differentiate_key(call, b, task % problem.heads_kv, j, scratch.rows, worker_scratch(worker));
        }
      });
  clear_unused_gradients(call);
  if (problem.features.mask_gradient) differentiate_mask(call, context, scratch.rows);
  if (call.dsinks != nullptr) differentiate_sinks(call, scratch.rows);
  if (call.dlogit_scale != nullptr) differentiate_logit_scale(call, context, scratch.rows);
}

}  // namespace tilewise::cpu::reference
