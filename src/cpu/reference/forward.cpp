#include <algorithm>

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/reference/reference.h"
#include "cpu/reference/softmax.h"
#include "cpu/unused_rows.h"

namespace tilewise::cpu::reference {
namespace {

// The scratch of a worker: S and O of one row.
std::int64_t doubles_of_forward_worker(const AttentionProblem& problem) {
  return problem.length_k + problem.dim_v;
}

void attend_query(const Query& query, double* scores, double* o) {
  const AttentionCall& call = query.call;
  const Softmax softmax = softmax_row(query, scores);
  std::fill_n(o, call.problem.dim_v, 0.0);
  for (std::int64_t j = 0; j < query.sequence.length_k; ++j) {
    const double p = softmax.p(scores[j]) * query.dropout_factor(j);
    if (p != 0) add_scaled(o, p, call.v.dtype, query.key_row(call.v, j), call.problem.dim_v);
  }
  store_row(query.row(call.o), call.o.dtype, o, 1.0, call.problem.dim_v);
  if (call.lse.wanted) store_element(query.row(call.lse), call.lse.dtype, 0, softmax.lse());
}

}  // namespace

std::size_t forward_workspace(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  Arena arena(nullptr);
  arena.take<double>(workers_for(context.parallel_for, problem.batch * problem.heads_q),
                     doubles_of_forward_worker(problem));
  return arena.used();
}

void forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  double* scratch = static_cast<double*>(context.workspace.data);
  for_each_task(context.parallel_for, problem.batch * problem.heads_q,
                [&](std::int64_t worker, std::int64_t task) {
                  const std::int64_t b = task / problem.heads_q;
                  const std::int64_t h = task % problem.heads_q;
                  double* scores = scratch + worker * doubles_of_forward_worker(problem);
                  for (std::int64_t i = 0; i < call.sequence(b).length_q; ++i) {
                    attend_query(Query{call, b, h, i}, scores, scores + problem.length_k);
                  }
                });
  clear_unused_outputs(call);
}

}  // namespace tilewise::cpu::reference
