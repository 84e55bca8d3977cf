#include "cuda/attention/sm90/backward/backward.h"

#include <algorithm>

#include "cuda/attention/sm90/backward/run.cuh"

namespace tilewise::cuda::wgmma_backward {
namespace {

std::string unsuited_blocks(const AttentionProblem& problem) {
  const Config& c = Configs::rows[row_of<Configs>(problem)];
  const auto suits = [](std::int64_t block, std::int64_t all, int tile) {
    return block % tile == 0 || block >= all;
  };
  if (!suits(problem.block_q, problem.length_q, c.queries) ||
      !suits(problem.block_k, problem.length_k, c.keys)) {
    return "takes block masks of blocks of multiples of " + std::to_string(c.queries) + " queries and " +
           std::to_string(c.keys) + " keys, or of all";
  }
  if (stages_of(c, problem).mask == 0) {
    return "has no shared memory for a block mask, a mask of f32 and dropout with head dims of 65 to 128";
  }
  return {};
}

std::string unsuited_features(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (features.logit_scale) return "backward takes no logit scale";
  if (is_general(problem) && (problem.piece.wide_rows || problem.piece.share_of_keys))
    return "backward takes pieces with causal, windows and lengths alone";
  if (features.mask != MaskKind::none && problem.layout == Layout::packed)
    return "takes no mask of packed sequences";
  return features.block_mask ? unsuited_blocks(problem) : "";
}

}  // namespace

std::string unsuited(const AttentionProblem& problem) {
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "takes f16 and bf16";
  if (problem.strict) return "rounds weights and score gradients, which strict precision does not allow";
  if (problem.layout == Layout::paged) return "takes no pages";
  if (problem.dim_qk > most_dim || problem.dim_v > most_dim)
    return "takes head dims to " + std::to_string(most_dim);
  if (const std::string reason = unsuited_features(problem); !reason.empty()) return reason;
  if (problem.dim_qk % 8 != 0 || problem.dim_v % 8 != 0 || !problem.aligned ||
      !problem.backward.aligned_rows || !problem.backward.ordered_rows) {
    return "copies rows from multiples of 16 bytes, with such strides, alone";
  }
  constexpr std::int64_t most_length = 1 << 29;  // positions, tiles past the end too, fit 32 bits
  if (problem.length_q >= most_length || problem.length_k >= most_length)
    return "takes sequences of fewer than 2^29";
  constexpr std::int64_t most = 0x7fffffff;
  if (problem.batch * problem.heads_q * (problem.length_q / 64 + 1) > most)
    return "takes fewer than 2^31 tiles";
  if (std::max(problem.queries, problem.keys) > most)
    return "takes fewer than 2^31 queries and keys of a head";
  if (problem.length_q == 0 || problem.length_k == 0) return "takes no less than one query and one key";
  return {};
}

std::string trial(const AttentionProblem& problem) {
  return has_separate_dmask(problem) ? "gradients of masks whose elements pairs share, or beside softcap" : "";
}

std::size_t backward_workspace(const AttentionCall& call) { return workspace_bytes<Configs>(call); }

void backward(const AttentionCall& call, const Context& context) { run_in<Configs>(call, context); }

}  // namespace tilewise::cuda::wgmma_backward
