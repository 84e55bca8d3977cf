#include <cmath>
#include <utility>

#include "support/random_parts.h"
#include "support/random_placement.h"

namespace tilewise::test {
namespace {

// Rows of these head dims are multiples of 16 bytes in every type. Lengths are close to those of tiles, and
// small enough for the reference and for sanitizers.
std::int64_t plain_head_dim(Random& rng) {
  return rng.pick<std::int64_t>({32, 40, 64, 64, 72, 96, 128, 128});
}

void choose_plain_shape(Random& rng, RandomProblem& p) {
  p.aligned = p.aligned_results = true;
  p.dtype = rng.pick({DType::f32, DType::f32, DType::f16, DType::bf16});
  p.batch = rng.between(1, 2);
  p.heads_kv = rng.between(1, 2);
  p.heads_q = p.heads_kv * rng.between(1, 2);
  p.length_q = rng.pick<std::int64_t>({2, 31, 64, 65, 100, 128, 150, 193});
  p.length_k = rng.pick<std::int64_t>({65, 96, 127, 128, 129, 160, 200, 257});
  p.dim_qk = plain_head_dim(rng);
  p.dim_v = rng.chance(0.7) ? p.dim_qk : plain_head_dim(rng);
}

void choose_band(Random& rng, AttentionOptions& options) {
  if (rng.chance(0.2)) options.scale = rng.pick({1.0f, -0.2f, 0.05f});
  options.causal = rng.chance(0.4);
  options.alignment = rng.pick({Alignment::top_left, Alignment::bottom_right});
  if (rng.chance(0.2)) options.window = {.left = rng.between(0, 100), .right = rng.between(0, 100)};
  options.deterministic = rng.chance(0.3);
}

// Several tiles of 64 queries and of 128 keys, and head dims beyond those of wgmma. A quarter of the results
// have rows that are not aligned.
void choose_wide_heads(Random& rng, RandomProblem& p) {
  p.aligned = true;
  p.aligned_results = rng.chance(0.75);
  p.dtype = rng.pick({DType::f16, DType::bf16});
  p.batch = rng.between(1, 2);
  p.heads_kv = rng.between(1, 2);
  p.heads_q = p.heads_kv * rng.between(1, 2);
  p.length_q = rng.pick<std::int64_t>({1, 31, 63, 64, 65, 100, 128, 129, 200});
  p.length_k = rng.pick<std::int64_t>({1, 65, 127, 128, 129, 200, 256, 257, 384, 500, 641});
  const auto dim = [&] {
    return rng.pick<std::int64_t>({264, 288, 320, 384, 384, 392, 448, 504, 512, 512, 512});
  };
  p.dim_qk = dim();
  p.dim_v = rng.chance(0.7) ? p.dim_qk : rng.pick<std::int64_t>({8, 64, 128, 200, 256, dim()});
  if (rng.chance(0.1)) std::swap(p.dim_qk, p.dim_v);
}

/// Draws the tensors of a problem whose shape and options are chosen, and whose scores only a band hides.
Magnitudes make_plain_tensors(Random& rng, RandomProblem& p) {
  const Magnitudes magnitudes = choose_magnitudes(rng, p);
  const auto rows = [&](const Shape& shape, double size) {
    Buffer buffer = random_buffer(rng, p.dtype, shape, aligned_rows(0));
    buffer.fill_random(rng, size);
    return buffer;
  };
  p.q = rows({p.batch, p.heads_q, p.length_q, p.dim_qk}, magnitudes.qk);
  p.k = rows({p.batch, p.heads_kv, p.length_k, p.dim_qk}, magnitudes.qk);
  p.v = rows({p.batch, p.heads_kv, p.length_k, p.dim_v}, magnitudes.v);
  p.d_o = rows(p.beside_q(p.dim_v), magnitudes.d_o);
  return magnitudes;
}

// Few tiles of 128 rows and keys, but often several heads, and in one of four problems of neighbouring
// entries with any strides between them. Half of the problems hide whole tiles by causal or a window, and a
// quarter by blocks.
void choose_wide_f32(Random& rng, RandomProblem& p) {
  p.aligned = p.aligned_results = true;
  p.dtype = DType::f32;
  p.layout = Layout::dense;
  p.batch = rng.between(1, 3);
  p.heads_kv = rng.between(1, 4);
  p.heads_q = p.heads_kv * rng.pick<std::int64_t>({1, 1, 2, 3});
  p.length_q = rng.pick<std::int64_t>({1, 31, 100, 128, 129, 200, 300});
  p.length_k = rng.pick<std::int64_t>({1, 65, 127, 128, 129, 200, 257, 384});
  const auto dim = [&] { return rng.pick<std::int64_t>({132, 136, 160, 192, 256, 256, 260, 320}); };
  p.dim_qk = dim();
  p.dim_v = rng.chance(0.7) ? p.dim_qk : rng.pick<std::int64_t>({4, 64, 128, dim()});
  if (rng.chance(0.1)) std::swap(p.dim_qk, p.dim_v);
}

// Hides tiles of 128 x 128 pairs. There are more lengths here than heads.
void choose_hidden_tiles(Random& rng, RandomProblem& p) {
  if (rng.chance(0.5)) return;
  p.batch = 1;
  p.heads_kv = rng.between(1, 2);
  p.heads_q = p.heads_kv * rng.between(1, 2);
  p.length_q = rng.pick<std::int64_t>({129, 200, 300, 400});
  p.length_k = rng.chance(0.5) ? p.length_q : rng.pick<std::int64_t>({129, 257, 384, 450});
  p.dim_qk = rng.pick<std::int64_t>({132, 136, 160, 256});
  const double kind = rng.unit();
  p.options.causal = kind < 0.6;
  if (kind < 0.4) return;
  const auto side = [&] { return rng.pick<std::int64_t>({0, 5, 63, 64, 100, 128, 150}); };
  p.options.window.left = side();
  if (rng.chance(0.5)) p.options.window.right = side();
}

}  // namespace

RandomProblem random_plain_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem p;
  p.seed = seed;
  choose_plain_shape(rng, p);
  choose_band(rng, p.options);
  make_plain_tensors(rng, p);
  p.asked.dq = rng.chance(0.9);
  p.asked.dk = rng.chance(0.9);
  p.asked.dv = rng.chance(0.9);
  p.asked.own_forward = rng.chance(0.5);
  return p;
}

RandomProblem random_wide_heads_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem p;
  p.seed = seed;
  choose_wide_heads(rng, p);
  choose_band(rng, p.options);
  if (p.options.scale.has_value()) p.options.scale = std::abs(*p.options.scale);
  make_plain_tensors(rng, p);
  p.asked.backward = false;
  return p;
}

RandomProblem random_wide_f32_problem(std::uint64_t seed) {
  Random rng(seed);
  RandomProblem p;
  p.seed = seed;
  choose_wide_f32(rng, p);
  choose_options(rng, p);
  Random own(p.seed + 5);  // a generator of its own, so that the other choices of a seed do not change
  choose_hidden_tiles(own, p);
  const Magnitudes magnitudes = make_plain_tensors(rng, p);
  if (rng.chance(0.3)) {
    p.d_lse = random_buffer(rng, DType::f32, p.statistics_shape(), {});
    p.d_lse.fill_random(rng, magnitudes.d_o);
  }
  make_masks(rng, p, magnitudes);
  make_head_values(rng, p, magnitudes);
  if (own.chance(0.25)) {
    p.blocks = {};
    p.blocks.block_q = own.pick<std::int64_t>({31, 64, 128, 128, 200});
    p.blocks.block_k = own.pick<std::int64_t>({31, 64, 128, 128, 200});
    make_blocks(own, p);
  }
  p.logit_scale = {};
  choose_asked(rng, p);
  p.asked.dmask = false;
  return p;
}

}  // namespace tilewise::test
