#include "attention/problem.h"

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
  if (problem.piece != PieceDetails{}) text << ", piece";
  return text.str();
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
