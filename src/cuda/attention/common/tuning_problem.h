#pragma once

#include <string_view>

#include "attention/call.h"
#include "core/tuning.h"

namespace tilewise {

/// What the speed of a configuration depends on, as tuning files name it. What index tensors hold is unknown,
/// so sequences count as the longest.
template <typename Text>
void describe_problem(const AttentionCall& call, Description<Text>& to) {
  const AttentionProblem& problem = call.problem;
  const bool left = call.band.left < Band::unbounded, right = call.band.right < Band::unbounded;
  to.word(to_string(problem.dtype));
  to.word(left ? "window" : right ? "causal" : "full");
  if (left) to.size("window", call.band.left + (right ? call.band.right : 0));
  to.size("batch", problem.batch);
  to.size("heads", problem.heads_q);
  to.size("kv_heads", problem.heads_kv);
  to.size("queries", problem.length_q);
  to.size("keys", problem.length_k);
  if (call.packed()) to.size("tokens", call.total_q);
  to.number("dim", problem.dim_qk);
  to.number("dim_v", problem.dim_v);
  to.word(problem.pass == Pass::backward && call.deterministic ? "deterministic" : "");
}
inline Device tuning_device(const AttentionCall& call) { return call.problem.device; }

}  // namespace tilewise
