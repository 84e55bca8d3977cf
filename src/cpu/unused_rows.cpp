#include "cpu/unused_rows.h"

#include <algorithm>
#include <limits>

#include "core/load.h"

namespace tilewise::cpu {
namespace {

void clear(const Rows& rows, std::int64_t b, std::int64_t heads, KeyRange range, std::int64_t dim) {
  if (!rows.wanted) return;
  const std::int64_t bytes = dim * static_cast<std::int64_t>(size_of(rows.dtype));
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t s = range.first; s < range.last; ++s)
      std::fill_n(rows.at(b, h, s), bytes, std::byte{0});
  }
}

}  // namespace

void clear_unused_outputs(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  if (problem.layout != Layout::packed) return;
  const KeyRange unused{call.cumulative_q.at(problem.batch), call.total_q};
  clear(call.o, 0, problem.heads_q, unused, problem.dim_v);
  if (!call.lse.wanted) return;
  for (std::int64_t h = 0; h < problem.heads_q; ++h) {
    for (std::int64_t s = unused.first; s < unused.last; ++s) {
      store_element(call.lse.at(0, h, s), call.lse.dtype, 0, -std::numeric_limits<double>::infinity());
    }
  }
}

void clear_unused_gradients(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  if (problem.layout == Layout::packed) {
    const KeyRange unused_k{call.cumulative_k.at(problem.batch), call.total_k};
    clear(call.dq, 0, problem.heads_q, {call.cumulative_q.at(problem.batch), call.total_q}, problem.dim_qk);
    clear(call.dk, 0, problem.heads_kv, unused_k, problem.dim_qk);
    clear(call.dv, 0, problem.heads_kv, unused_k, problem.dim_v);
  } else {
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const KeyRange unused{call.sequence(b).length_k, problem.length_k};
      clear(call.dk, b, problem.heads_kv, unused, problem.dim_qk);
      clear(call.dv, b, problem.heads_kv, unused, problem.dim_v);
    }
  }
}

}  // namespace tilewise::cpu
