#include "cuda/attention/sm90/backward/backward.h"

#include <algorithm>

#include "core/reasons.h"
#include "cuda/attention/sm90/backward/run.cuh"

namespace tilewise::cuda::wgmma_backward {
namespace {

std::string unsuited_blocks(const AttentionProblem& problem) {
  const Config& c = Configs::rows[row_of<Configs>(problem)];
  if (!suits_blocks(c, problem)) {
    return "needs mask blocks in multiples of " + std::to_string(c.queries) + " queries and " +
           std::to_string(c.keys) + " keys, or of the whole length, got " + std::to_string(problem.block_q) +
           " x " + std::to_string(problem.block_k);
  }
  if (stages_of(c, problem).mask == 0) {
    return "lacks shared memory for a block mask, an f32 mask and dropout with head dims of 65 to 128";
  }
  return {};
}

std::string unsuited_features(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (features.logit_scale) return "backward does not support a logit scale";
  const bool plain = !is_general(problem) && !features.sinks && !features.block_mask && !problem.key_mask &&
                     !features.dropout;
  if (!plain && (problem.piece.wide_rows || problem.piece.share_of_keys))
    return "backward supports no features in pieces other than causal, window and lengths";
  if (features.mask != MaskKind::none && problem.layout == Layout::packed)
    return "does not support masks with packed sequences";
  return features.block_mask ? unsuited_blocks(problem) : "";
}

}  // namespace

std::string unsuited(const AttentionProblem& problem) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16)
    return needs("f16 or bf16", to_string(problem.dtype));
  if (problem.strict) return "backward rounds P and dS to 16 bits, which strict precision does not allow";
  if (problem.layout == Layout::paged) return "paged keys have no backward";
  const std::int64_t dim = std::max(problem.dim_qk, problem.dim_v);
  if (dim > most_dim) return supports_up_to("head dims", most_dim, dim);
  if (const std::string reason = unsuited_features(problem); !reason.empty()) return reason;
  if (problem.dim_qk % 8 != 0 || problem.dim_v % 8 != 0 || !problem.aligned ||
      !problem.backward.aligned_rows || !problem.backward.ordered_rows) {
    return "backward needs head dims in multiples of 8 and rows that start at multiples of 16 bytes, without "
           "negative strides";
  }
  constexpr std::int64_t most_length = 1 << 29;  // positions, tiles past the end too, fit 32 bits
  const std::int64_t length = std::max(problem.length_q, problem.length_k);
  if (length >= most_length) return supports_up_to("sequence lengths", most_length - 1, length);
  constexpr std::int64_t most = 0x7fffffff;
  if (problem.batch * problem.heads_q * (problem.length_q / 64 + 1) > most)
    return "supports fewer than 2^31 query tiles";
  if (std::max(problem.queries, problem.keys) > most)
    return "supports fewer than 2^31 queries and keys per head";
  if (problem.length_q == 0 || problem.length_k == 0) return "needs at least one query and one key";
  return {};
}

std::size_t backward_workspace(const AttentionCall& call) { return workspace_bytes<Configs>(call); }

void backward(const AttentionCall& call, const Context& context) { run_in<Configs>(call, context); }

}  // namespace tilewise::cuda::wgmma_backward
