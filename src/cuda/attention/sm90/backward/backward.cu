#include "cuda/attention/sm90/backward/backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/attention/sm90/backward/run.cuh"

namespace tilewise::cuda::wgmma_backward {
namespace {

bool is_general(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  return features.mask != MaskKind::none || features.dropout || features.softcap || features.alibi ||
         features.sinks || features.block_mask;
}

int row_of(const AttentionProblem& problem) {
  const bool listed = problem.features.block_mask, general = is_general(problem);
  const auto* row = std::ranges::find_if(Configs::rows, [&](const Config& c) {
    return c.general == general && c.listed == listed && problem.dim_qk <= c.dim && problem.dim_v <= c.dim_v;
  });
  return static_cast<int>(row - std::begin(Configs::rows));
}

template <int row>
void run_row(const AttentionCall& call, const Context& context) {
  call.problem.dtype == DType::f16 ? run<__half, Configs, row>(call, context)
                                   : run<__nv_bfloat16, Configs, row>(call, context);
}

std::string unsuited_blocks(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  const Config& c = Configs::rows[row_of(problem)];
  const auto suits = [](std::int64_t block, std::int64_t all, int tile) {
    return block % tile == 0 || block >= all;
  };
  if (!suits(problem.block_q, problem.length_q, c.queries) ||
      !suits(problem.block_k, problem.length_k, c.keys)) {
    return "takes block masks of blocks of multiples of " + std::to_string(c.queries) + " queries and " +
           std::to_string(c.keys) + " keys, or of all";
  }
  if (problem.f32_mask && features.dropout &&
      c.shared_bytes(c.mask_bytes(4), kept_stages_of(problem)) > most_shared_bytes) {
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
  return has_dmask_apart(problem) ? "gradients of masks whose elements pairs share, or beside softcap" : "";
}

std::size_t backward_workspace(const AttentionCall& call) {
  Arena arena(nullptr);
  const Config& c = Configs::rows[row_of(call.problem)];
  const Workspace workspace = workspace_of(call, c, arena);
  block_lists_of(call, c, arena);
  dmask_plan_of(call, c, workspace.tiles, arena);
  aligned_mask_of(call, arena);
  return arena.used();
}

void backward(const AttentionCall& call, const Context& context) {
  const auto row = static_cast<std::size_t>(row_of(call.problem));
  [&]<std::size_t... n>(std::index_sequence<n...>) {
    (void)((n == row && (run_row<static_cast<int>(n)>(call, context), true)) || ...);
  }(std::make_index_sequence<std::size(Configs::rows)>{});
}

}  // namespace tilewise::cuda::wgmma_backward
