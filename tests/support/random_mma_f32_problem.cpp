#include <algorithm>
#include <cmath>

#include "support/random_parts.h"

namespace tilewise::test {
namespace {

constexpr double f32_max_cost = 2e7;           // of B·Hq·Sq·Sk·(D+Dv), so that the reference is fast enough
constexpr std::int64_t f32_least_window = 64;  // the kernel leaves smaller windows to others

std::int64_t mma_f32_head_dim(Random& rng) {
  return rng.pick<std::int64_t>({32, 36, 40, 48, 64, 64, 64, 68, 72, 80, 96, 100, 128, 128, 128});
}

void choose_mma_f32_shape(Random& rng, RandomProblem& p) {
  p.aligned = true;
  p.aligned_results = rng.chance(0.9);
  p.dtype = DType::f32;
  p.layout = rng.pick({Layout::dense, Layout::dense, Layout::dense, Layout::packed});
  p.dim_qk = rng.chance(0.05) ? rng.pick<std::int64_t>({136, 192, 256}) : mma_f32_head_dim(rng);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : mma_f32_head_dim(rng);
  p.length_q = rng.between(128, 300);
  p.length_k = rng.chance(0.3) ? p.length_q : rng.between(65, 300);
  const auto cost = static_cast<double>(p.length_q * p.length_k * (p.dim_qk + p.dim_v));
  const auto most_heads = std::max<std::int64_t>(1, static_cast<std::int64_t>(f32_max_cost / cost));
  p.batch = rng.between(1, std::min<std::int64_t>(most_heads, p.layout == Layout::packed ? 5 : 3));
  p.heads_kv = rng.between(1, std::clamp<std::int64_t>(most_heads / p.batch, 1, 3));
  p.heads_q =
      p.heads_kv * rng.between(1, std::clamp<std::int64_t>(most_heads / (p.batch * p.heads_kv), 1, 4));
}

}  // namespace

RandomProblem random_mma_f32_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_mma_f32_shape(rng, problem);
  choose_options(rng, problem);
  AttentionOptions& options = problem.options;
  options.softcap = 0;
  options.dropout = {};
  options.deterministic = rng.chance(0.05);
  if (options.scale.has_value()) options.scale = std::max(std::abs(*options.scale), 0.01f);
  if (options.window.left.has_value()) {
    options.window.left = std::max(*options.window.left, f32_least_window);
  }
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  problem.alibi_slopes = problem.logit_scale = {};
  if (rng.chance(0.75)) problem.sinks = {};
  choose_asked(rng, problem);
  // If only some gradients are wanted, another kernel computes them.
  if (rng.chance(0.75)) problem.asked.dq = problem.asked.dk = problem.asked.dv = true;
  return problem;
}

}  // namespace tilewise::test
