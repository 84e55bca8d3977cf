#include "attention/problem.h"

#include <algorithm>
#include <sstream>

namespace tilewise {
namespace {

const char* name(Layout layout) {
  switch (layout) {
    case Layout::dense: return "dense";
    case Layout::packed: return "packed";
    case Layout::paged: return "paged";
  }
  return "";
}

}  // namespace

std::string to_string(const AttentionProblem& problem) {
  std::ostringstream text;
  text << (problem.pass == Pass::forward ? "forward " : "backward ") << to_string(problem.dtype) << ' '
       << name(problem.layout) << " B" << problem.batch << " Hq" << problem.heads_q << " Hkv"
       << problem.heads_kv << " Sq" << problem.length_q << " Sk" << problem.length_k << " D" << problem.dim_qk
       << " Dv" << problem.dim_v << " on " << to_string(problem.device);
  const AttentionFeatures& features = problem.features;
  if (features.mask == MaskKind::boolean) text << ", boolean mask";
  if (features.mask == MaskKind::additive) text << ", additive mask";
  if (features.mask_gradient) text << ", mask gradient";
  if (features.causal) text << ", causal";
  if (features.window) text << ", window";
  if (features.softcap) text << ", softcap";
  if (features.alibi) text << ", alibi";
  if (features.sinks) text << ", sinks";
  if (features.dropout) text << ", dropout";
  if (features.key_lengths) text << ", key lengths";
  if (features.block_mask) text << ", block mask";
  if (features.logit_scale) text << ", logit scale";
  if (problem.strict) text << ", strict";
  if (problem.batch_invariant) text << ", batch invariant";
  if (problem.piece != PieceDetails{}) text << ", piece";
  return text.str();
}

AttentionProblem representative(const AttentionProblem& problem) {
  AttentionProblem found = problem;
  found.batch_invariant = false;
  if (problem.queries == 0 || problem.keys == 0) return found;  // all results are the same constants
  // With few caches, keys are split even if many sequences would fill the device without. With many
  // sequences, nothing is split.
  constexpr std::int64_t few = 4, many = 64;
  const bool cache = has_cache(problem);
  found.batch = cache ? few : many;
  found.length_q = choice_length_q(problem);
  if (!problem.features.block_mask) {
    found.length_k = cache ? std::max(usual_cache, found.length_q) : usual_length;
  }
  if (found.layout == Layout::packed) found.layout = Layout::dense;
  found.queries = found.batch * found.length_q;
  found.keys = found.batch * found.length_k;
  if (found.pass == Pass::backward) {
    found.backward.elements =
        std::min({found.heads_q * found.queries * found.dim_qk, found.heads_kv * found.keys * found.dim_qk,
                  found.heads_kv * found.keys * found.dim_v});
  }
  return found;
}

std::string unsuited_piece(const AttentionProblem& problem) {
  const PieceDetails& piece = problem.piece;
  if (piece.placed) return "does not support ALiBi or dropout in pieces with offsets or steps";
  if (piece.off_diagonal) return "needs a band that includes each query's own key";
  if (piece.wide_rows) return "needs results in the type of q, got f32";
  if (piece.wide_statistics) return "needs lse in f32, got f64";
  if (piece.share_of_keys) return "needs all keys of each query in backward";
  return {};
}

}  // namespace tilewise
