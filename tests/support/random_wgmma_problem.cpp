#include <algorithm>
#include <cmath>

#include "support/random_parts.h"

namespace tilewise::test {

Buffer with_aligned_rows(const Buffer& buffer) {
  Shape padding(buffer.shape().size(), 0);
  padding.back() = (16 - buffer.shape().back() % 16) % 16;
  Buffer aligned(buffer.dtype(), buffer.shape(), {.padding = padding});
  aligned.set_values(buffer.values());
  return aligned;
}

namespace {

// Bounds of B·Hq·Sq·Sk·(D+Dv): there must be many results, and the reference must be fast enough.
constexpr double wgmma_min_cost = 2e6;
constexpr double wgmma_max_cost = 2e7;
constexpr std::int64_t wgmma_least_results = 16384;  // the kernel leaves smaller problems to others
constexpr std::int64_t least_queries = 8;
constexpr std::int64_t least_rows_of_large_dims = 1024;    // likewise
constexpr std::int64_t least_rows_of_largest_dims = 8192;  // likewise, above 192 with a block mask
constexpr double least_pairs_of_largest_dims = 0x1p20;     // likewise, above 192
constexpr std::int64_t largest_dim_with_mask = 128;        // or dropout, outside of trials
constexpr std::int64_t largest_dim_with_softcap = 128;

std::int64_t wgmma_head_dim(Random& rng) {
  return rng.pick<std::int64_t>(
      {16,  24,  32,  40,  48,  56,  64,  64,  64,  64,  64,
       64,  72,  80,  88,  96,  96,  104, 112, 120, 128, 128,
       128, 128, 128, 128, 136, 144, 160, 176, 192, 192, rng.pick<std::int64_t>({200, 256, 256})});
}

// A length up to the limit, often a multiple of a tile size, one less or one more.
std::int64_t wgmma_length(Random& rng, double limit) {
  const auto most = std::max<std::int64_t>(1, static_cast<std::int64_t>(limit));
  if (rng.chance(0.1)) return rng.between(1, most);
  const std::int64_t tile = rng.pick<std::int64_t>({16, 64, 80, 112, 128, 192});
  if (most < tile || rng.chance(0.4)) return rng.between((most + 1) / 2, most);
  return std::clamp<std::int64_t>(most / tile * tile + rng.between(-1, 1), 1, most + 1);
}

void choose_wgmma_shape(Random& rng, RandomProblem& p) {
  p.aligned = true;
  p.dtype = rng.pick({DType::f16, DType::bf16});
  p.layout = rng.pick({Layout::dense, Layout::dense, Layout::dense, Layout::packed});
  p.batch = rng.between(1, p.layout == Layout::packed ? 6 : 4);
  p.heads_kv = rng.pick<std::int64_t>({1, 1, 2, 3});
  p.heads_q = p.heads_kv * rng.pick<std::int64_t>({1, 1, 2, 4, 8});
  p.dim_qk = wgmma_head_dim(rng);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : wgmma_head_dim(rng);
  const std::int64_t heads = p.batch * p.heads_q;
  const double pairs =
      rng.log_uniform(wgmma_min_cost, wgmma_max_cost) / static_cast<double>(heads * (p.dim_qk + p.dim_v));
  // Only some packed sequences have the full length.
  const double filled = p.layout == Layout::packed ? 0.5 : 1.0;
  const std::int64_t least_rows = std::max(p.dim_qk, p.dim_v) > 128
                                      ? least_rows_of_large_dims
                                      : (wgmma_least_results + p.dim_v - 1) / p.dim_v;
  const double least = static_cast<double>(least_rows) / (filled * static_cast<double>(heads));
  // The share of queries: as few as possible, some, about as many as keys, more.
  const double share = rng.pick({0.0, 0.3, 0.5, 0.5, 0.5, 0.7});
  const double queries = std::max(least, std::pow(pairs, share));
  p.length_q =
      std::max({static_cast<std::int64_t>(std::ceil(least)), least_queries, wgmma_length(rng, queries)});
  p.length_k = wgmma_length(rng, pairs / queries);
  if (rng.chance(0.3)) p.length_k = std::min(p.length_q, 2 * p.length_k);
  if (p.dim_qk > 192) {
    const double rows = filled * static_cast<double>(heads * p.length_q);
    p.length_k = std::max(p.length_k, static_cast<std::int64_t>(least_pairs_of_largest_dims / rows) + 1);
  }
}

/// Aligns the rows of masks and removes features beside masks and dropout, except for the band.
void keep_mask_alone(RandomProblem& p) {
  const bool lengths = p.key_lengths.given() || p.layout == Layout::packed;  // keys past them hold anything
  if (lengths) p.options.dropout = {};
  if (lengths || p.mask.shape().empty() || p.mask.shape().back() != p.length_k) p.mask = {};
  if (!p.mask.given() && p.options.dropout.probability == 0) return;
  p.options.softcap = 0;
  p.alibi_slopes = p.sinks = p.logit_scale = {};
  if (!p.mask.given()) return;
  p.mask = with_aligned_rows(p.mask);
}

// Few heads, so that there are several rows of query blocks.
void choose_block_shape(Random& rng, RandomProblem& p) {
  p.aligned = true;
  p.dtype = rng.pick({DType::f16, DType::bf16});
  p.batch = rng.between(1, 2);
  p.heads_kv = rng.between(1, 2);
  p.heads_q = p.heads_kv * rng.between(1, 2);
  p.dim_qk = wgmma_head_dim(rng);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : wgmma_head_dim(rng);
  const bool largest = p.dim_qk > 192;
  if (largest) p.heads_q *= 8;
  const std::int64_t heads = p.batch * p.heads_q;
  const std::int64_t least_rows = largest ? least_rows_of_largest_dims
                                  : std::max(p.dim_qk, p.dim_v) > 128
                                      ? least_rows_of_large_dims
                                      : (wgmma_least_results + p.dim_v - 1) / p.dim_v;
  const std::int64_t least = std::max<std::int64_t>(17, (least_rows + heads - 1) / heads);
  p.length_q = std::max(least, wgmma_length(rng, 700.0 / static_cast<double>(heads)));
  p.length_k = wgmma_length(rng, rng.log_uniform(100, 1500));
  if (largest) p.length_k = rng.between(128, 300);
}

}  // namespace

RandomProblem random_wgmma_block_problem(std::uint64_t seed) {
  Random rng(seed);
  Random own(seed + 3);  // a generator of its own, so that the other choices of a seed do not change
  const bool features = own.chance(0.6);
  RandomProblem problem;
  problem.seed = seed;
  choose_block_shape(rng, problem);
  choose_options(rng, problem);
  const bool large = std::max(problem.dim_qk, problem.dim_v) > largest_dim_with_softcap;
  if (!features || large) problem.options.dropout = {};
  if (!features || large) problem.options.softcap = 0;
  if (problem.options.scale.has_value()) {
    problem.options.scale = std::max(std::abs(*problem.options.scale), 0.01f);
  }
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  if (features) make_head_values(own, problem, magnitudes);
  if (!features && problem.key_lengths.given()) {  // keys past them hold anything
    problem.key_lengths = {};
    problem.k.fill_random(rng, magnitudes.qk);
    problem.v.fill_random(rng, magnitudes.v);
  }
  const auto block = [&](std::int64_t length) {
    return rng.pick<std::int64_t>({128, 128, 128, 128, 256, 384, length, 4 * length});
  };
  problem.blocks.block_q = block(problem.length_q);
  problem.blocks.block_k = block(problem.length_k);
  make_blocks(rng, problem);
  if (problem.blocks.tiles.given()) problem.blocks.tiles = with_aligned_rows(problem.blocks.tiles);
  problem.asked.backward = false;
  return problem;
}

RandomProblem random_wgmma_mask_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_wgmma_shape(rng, problem);
  choose_options(rng, problem);
  AttentionOptions& options = problem.options;
  if (problem.layout == Layout::packed || rng.chance(0.3)) {
    options.dropout = {.probability = rng.pick({0.1f, 0.5f}), .seed = rng.bits(), .offset = rng.bits()};
  }
  if (std::max(problem.dim_qk, problem.dim_v) > largest_dim_with_softcap) options.softcap = 0;
  if (options.scale.has_value()) options.scale = std::max(std::abs(*options.scale), 0.01f);
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  const auto chosen = [&] { return problem.mask.given() || options.dropout.probability > 0; };
  for (bool first = true; first || !chosen(); first = false) make_masks(rng, problem, magnitudes);
  problem.blocks = {};
  if (problem.mask.given() && rng.chance(0.5)) problem.mask = with_aligned_rows(problem.mask);
  problem.asked.backward = false;
  return problem;
}

RandomProblem random_wgmma_problem(std::uint64_t seed, bool f32) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_wgmma_shape(rng, problem);
  if (f32) {
    problem.dtype = DType::f32;
    problem.dim_qk = std::clamp<std::int64_t>(problem.dim_qk, 32, 128);
    problem.dim_v = std::clamp<std::int64_t>(problem.dim_v, 32, 128);
  }
  choose_options(rng, problem);
  const bool masks = !f32 && std::max(problem.dim_qk, problem.dim_v) <= largest_dim_with_mask;
  if (!masks) problem.options.dropout = {};
  if (f32) problem.options.softcap = 0;
  if (problem.options.scale.has_value()) {
    problem.options.scale = std::max(std::abs(*problem.options.scale), 0.01f);
  }
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  if (f32) problem.alibi_slopes = {};
  if (masks) make_masks(rng, problem, magnitudes);
  problem.blocks = {};
  if (problem.mask.given() || problem.options.dropout.probability > 0) keep_mask_alone(problem);
  problem.asked.backward = false;
  return problem;
}

}  // namespace tilewise::test
