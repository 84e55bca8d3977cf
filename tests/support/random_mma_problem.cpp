#include <algorithm>
#include <cmath>

#include "support/random_parts.h"

namespace tilewise::test {
namespace {

// Bounds of B·Hq·Sq·Sk·(D+Dv): gradients must have many elements, and the reference must be fast enough.
constexpr double mma_min_cost = 1e6;
constexpr double mma_max_cost = 1e7;
constexpr std::int64_t least_keys = 65;  // except in few_keys_share of the problems
constexpr double few_keys_share = 0.12;
constexpr std::int64_t mma_least_results = 16384;
constexpr std::int64_t many_results = std::int64_t{1} << 18;
constexpr double many_results_share = 0.15;
constexpr std::int64_t chunk_dims = 8;  // 16 bytes
constexpr double narrow_share = 0.06;   // of problems with smaller head dims
constexpr double long_share = 0.15;

std::int64_t mma_head_dim(Random& rng) {
  return rng.pick<std::int64_t>(
      {8, 24, 31, 40, 56, 64, 64, 64, 64, 72, 80, 96, 100, 128, 128, 128, 128, 136, 160, 192, 200, 256, 256});
}

/// Chooses narrow head dims in some problems. A generator of its own keeps the other choices of a seed
/// unchanged.
void choose_narrow_dims(RandomProblem& p) {
  Random rng(p.seed + 6);
  if (!rng.chance(narrow_share)) return;
  p.dim_qk = rng.between(1, chunk_dims - 1);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : rng.between(1, chunk_dims - 1);
}

/// Chooses few keys in some problems, likewise.
void choose_few_keys(RandomProblem& p) {
  Random rng(p.seed + 7);
  if (rng.chance(few_keys_share)) p.length_k = rng.between(1, least_keys - 1);
}

void choose_mma_shape(Random& rng, RandomProblem& p) {
  p.aligned = p.aligned_results = rng.chance(0.6);
  p.dtype = rng.pick({DType::f16, DType::bf16});
  p.layout = rng.pick({Layout::dense, Layout::dense, Layout::dense, Layout::packed});
  p.batch = rng.between(1, p.layout == Layout::packed ? 5 : 3);
  p.heads_kv = rng.pick<std::int64_t>({1, 1, 2, 3});
  p.heads_q = p.heads_kv * rng.pick<std::int64_t>({1, 1, 2, 4});
  p.dim_qk = mma_head_dim(rng);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : mma_head_dim(rng);
  choose_narrow_dims(p);
  const std::int64_t heads = p.batch * p.heads_q;
  // Narrow heads get as many rows as heads of two chunks. With more, the reference would take too long.
  const bool narrow = p.dim_qk < chunk_dims;
  const std::int64_t dim_qk = narrow ? 2 * chunk_dims : p.dim_qk;
  const std::int64_t dim_v = narrow ? 2 * chunk_dims : p.dim_v;
  // The fewest rows in all heads together, for queries and for keys.
  const std::int64_t least_rows = mma_least_results / std::min(dim_qk, dim_v) + 1;
  const double pairs =
      rng.log_uniform(mma_min_cost, mma_max_cost) / static_cast<double>(heads * (dim_qk + dim_v));
  // Only some packed sequences have the full length.
  const std::int64_t filled = p.layout == Layout::packed ? 2 : 1;
  const double share = rng.pick({0.3, 0.5, 0.5, 0.5, 0.7});
  const auto queries = static_cast<std::int64_t>(std::pow(pairs, share)) + rng.between(-1, 1);
  p.length_q = std::max({std::int64_t{1}, filled * least_rows / heads + 1, queries});
  const auto keys = static_cast<std::int64_t>(pairs / static_cast<double>(p.length_q)) + rng.between(-1, 1);
  p.length_k = std::max({least_keys, least_rows / (p.batch * p.heads_kv) + 1, keys});
  if (rng.chance(0.3)) p.length_q = p.length_k = std::max(p.length_q, p.length_k);
}

/// Many results, with short sequences so that the reference is fast enough: its time is proportional to
/// max(Sk, Sq · group) · (D + Dv) / min(D, Dv).
void choose_many_results(Random& rng, RandomProblem& p) {
  p.aligned = p.aligned_results = true;
  p.dim_qk = (p.dim_qk + 7) / 8 * 8;
  p.dim_v = rng.chance(0.8) ? p.dim_qk : std::max<std::int64_t>(8, p.dim_qk / 16 * 8);
  const std::int64_t group = rng.pick<std::int64_t>({1, 1, 2});
  p.heads_q = p.heads_kv * group;
  p.length_k = rng.between(least_keys, rng.chance(0.9) ? 100 : 250);
  p.length_q = rng.between(p.length_k / 2, p.length_k) / group;
  const std::int64_t filled = p.layout == Layout::packed ? 2 : 1;
  const std::int64_t rows =
      std::min(p.heads_q * p.length_q, p.heads_kv * p.length_k) * std::min(p.dim_qk, p.dim_v);
  p.batch = filled * (many_results / rows + 1);
}

/// The same with few long sequences, in which a CTA loops over many Q tiles.
void choose_long_walks(Random& rng, RandomProblem& p) {
  p.heads_kv = 1;
  p.heads_q = rng.pick<std::int64_t>({1, 1, 2});
  p.length_q = rng.between(300, 1000);
  p.length_k = rng.between(150, 600);
  const std::int64_t filled = p.layout == Layout::packed ? 2 : 1;
  const std::int64_t rows =
      std::min(p.heads_q * p.length_q, p.heads_kv * p.length_k) * std::min(p.dim_qk, p.dim_v);
  p.batch = filled * (many_results / rows + 1);
}

/// The shape of triangle attention over a pair representation: narrow heads, many entries.
void choose_pair_rows(Random& rng, RandomProblem& p) {
  p.layout = Layout::dense;
  p.heads_q = p.heads_kv = rng.between(1, 4);
  p.dim_qk = p.dim_v = rng.pick<std::int64_t>({16, 32, 32, 32, 64});
  p.length_q = p.length_k = rng.between(40, 200);
  const double pairs = static_cast<double>(p.heads_q * p.length_q * p.length_k);
  const double rows = mma_max_cost / (pairs * 2 * static_cast<double>(p.dim_qk));
  p.batch = std::clamp(static_cast<std::int64_t>(rows), std::int64_t{2}, std::int64_t{20});
}

/// Removes all features but band, lengths and sinks, which the plain kernel takes.
void drop_features(RandomProblem& p) {
  p.options.softcap = 0;
  p.options.dropout = {};
  p.mask = p.alibi_slopes = p.logit_scale = {};
  p.blocks = {};
}

/// Makes a block mask with block sizes that the wgmma kernels take. Its tiles may have one row for all
/// queries, like a padding mask.
void make_blocks_of_tiles(Random& rng, RandomProblem& p) {
  const auto block = [&](std::int64_t length) {
    return rng.pick<std::int64_t>({64, 128, 128, 128, 256, length, 4 * length});
  };
  p.blocks.block_q = block(p.length_q);
  p.blocks.block_k = block(p.length_k);
  make_blocks(rng, p);
  Buffer& tiles = p.blocks.tiles;
  if (!tiles.given()) return;
  if (rng.chance(0.5)) tiles = with_aligned_rows(tiles);
  if (!rng.chance(0.3)) return;
  tiles = Buffer(DType::boolean, tiles.shape(), {.expanded = {1}});
  tiles.fill_random(rng);
}

}  // namespace

RandomProblem random_wgmma_backward_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_mma_shape(rng, problem);
  problem.dim_qk = std::min<std::int64_t>(problem.dim_qk, 128);
  Random other(seed + 11);
  if (other.chance(0.25)) problem.dim_qk = other.pick<std::int64_t>({136, 160, 192, 192, 192, 256});
  choose_many_results(rng, problem);
  if (problem.dim_qk > 128 && other.chance(0.4)) problem.dim_v = 128;
  if (rng.chance(long_share)) choose_long_walks(rng, problem);
  choose_few_keys(problem);
  choose_options(rng, problem);
  problem.options.deterministic = false;
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_masks(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  drop_features(problem);
  choose_asked(rng, problem);
  return problem;
}

RandomProblem random_wgmma_features_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_mma_shape(rng, problem);
  problem.aligned = problem.aligned_results = true;
  const auto chunks = [](std::int64_t dim) { return std::min<std::int64_t>((dim + 7) / 8 * 8, 256); };
  problem.dim_qk = chunks(problem.dim_qk);
  problem.dim_v = chunks(problem.dim_v);
  choose_few_keys(problem);
  Random other(seed + 9);
  const bool pair_rows = other.chance(0.15);
  if (pair_rows) choose_pair_rows(other, problem);
  choose_options(rng, problem);
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_masks(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  problem.blocks = {};
  problem.logit_scale = {};
  const bool dense = problem.layout == Layout::dense;
  if (pair_rows || (dense && other.chance(0.3))) make_additive_mask(other, problem, magnitudes);
  if (dense && other.chance(0.3)) make_blocks_of_tiles(other, problem);
  const bool whole_rows = problem.mask.given() && !problem.mask.shape().empty() &&
                          problem.mask.shape().back() == problem.length_k;
  if (whole_rows && other.chance(0.5)) problem.mask = with_aligned_rows(problem.mask);
  choose_asked(rng, problem);
  return problem;
}

RandomProblem random_mma_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem problem;
  problem.seed = seed;
  choose_mma_shape(rng, problem);
  Random other(seed + 5);
  const bool many = other.chance(many_results_share);
  if (many) choose_many_results(other, problem);
  if (!many) choose_few_keys(problem);
  choose_options(rng, problem);
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_masks(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  if (many && other.chance(0.5)) drop_features(problem);
  choose_asked(rng, problem);
  return problem;
}

}  // namespace tilewise::test
