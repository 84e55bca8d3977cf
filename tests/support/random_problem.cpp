#include "support/random_problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "support/random_parts.h"
#include "support/random_placement.h"

namespace tilewise::test {
namespace {

// The upper bound of B·Hq·Sq·Sk·(D+Dv). Below it Sq·Sk is log-uniform, so that most problems are small.
constexpr double usual_cost = 2e6;

// The tile sizes of kernels, one less and one more, and primes.
constexpr std::array<std::int64_t, 62> tried_lengths = {
    1,   2,   3,   4,   5,   6,   7,    8,    9,    11,   12,   13,   15,   16,  17,  19,
    23,  24,  25,  29,  31,  32,  33,   37,   41,   47,   48,   49,   53,   61,  63,  64,
    65,  67,  79,  96,  97,  101, 127,  128,  129,  131,  191,  193,  251,  255, 256, 257,
    383, 385, 511, 512, 513, 769, 1021, 1025, 1537, 2047, 2049, 3001, 4093, 4097};

// One of the three largest lengths that do not exceed the limit.
std::int64_t random_length(Random& rng, double limit) {
  const auto end =
      std::upper_bound(tried_lengths.begin(), tried_lengths.end(), static_cast<std::int64_t>(limit));
  const auto index = std::max<std::int64_t>(0, end - tried_lengths.begin() - rng.between(1, 3));
  return tried_lengths[static_cast<std::size_t>(index)];
}

std::int64_t random_head_dim(Random& rng) {
  if (rng.chance(0.02)) return rng.pick<std::int64_t>({1024, 1031, 2048, 4095, 4096});
  if (rng.chance(0.08)) return rng.pick<std::int64_t>({192, 256, 320, 512});
  return rng.pick<std::int64_t>(
      {1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 40, 64, 64, 65, 80, 96, 100, 128, 128, 129});
}

void choose_shape(Random& rng, RandomProblem& p, double max_cost) {
  p.dtype = rng.pick({DType::f32, DType::f32, DType::f16, DType::bf16});
  p.layout = rng.pick({Layout::dense, Layout::dense, Layout::dense, Layout::packed, Layout::paged});
  p.batch = rng.chance(0.03) ? 0 : rng.between(1, p.layout == Layout::packed ? 5 : 3);
  p.heads_kv = rng.chance(0.01) ? 0 : rng.pick<std::int64_t>({1, 1, 1, 2, 3});
  p.heads_q = p.heads_kv * rng.pick<std::int64_t>({1, 1, 2, 3, 4, 8});
  p.dim_qk = random_head_dim(rng);
  p.dim_v = rng.chance(0.5) ? p.dim_qk : random_head_dim(rng);
  const std::int64_t heads = std::max<std::int64_t>(1, p.batch * p.heads_q);
  const double most_pairs = max_cost / static_cast<double>(heads * (p.dim_qk + p.dim_v));
  const double pairs = rng.log_uniform(4, std::max(16.0, most_pairs));
  // The share of queries: decoding, few queries, as many as keys, many queries, anything, few keys.
  const double share = rng.pick({0.0, 0.3, 0.5, 0.5, 0.7, rng.unit(), 1.0});
  p.length_q = random_length(rng, std::pow(pairs, share));
  p.length_k = random_length(rng, pairs / static_cast<double>(p.length_q));
  if (rng.chance(0.3)) p.length_q = p.length_k = std::min(p.length_q, p.length_k);
  if (rng.chance(0.03)) p.length_q = 0;
  if (rng.chance(0.03)) p.length_k = 0;
}

}  // namespace

void choose_asked(Random& rng, RandomProblem& p) {
  Asked& asked = p.asked;
  asked.dq = rng.chance(0.8);
  asked.dk = rng.chance(0.8);
  asked.dv = rng.chance(0.8);
  asked.dmask = p.mask.given() && p.mask.dtype() != DType::boolean && rng.chance(0.7);
  if (asked.dmask) asked.dmask_dtype = rng.pick({DType::f32, p.mask.dtype()});
  asked.dsinks = p.sinks.given() && rng.chance(0.8);
  asked.dlogit_scale = p.logit_scale.given() && asked.dq && rng.chance(0.8);
  asked.own_forward = rng.chance(0.5);
  const bool same_tokens =
      p.layout == Layout::packed ? p.q.extent(0) == p.k.extent(0) : p.length_q == p.length_k;
  asked.packed_outputs = p.layout != Layout::paged && p.dim_qk == p.dim_v && same_tokens && rng.chance(0.3);
}

void choose_options(Random& rng, RandomProblem& p) {
  AttentionOptions& options = p.options;
  const double root = std::sqrt(static_cast<double>(p.dim_qk));
  if (rng.chance(0.3)) {
    options.scale = static_cast<float>(rng.pick({1.0, -1.0, rng.log_uniform(0.1, 10) / root}));
    if (rng.chance(0.05)) options.scale = 0.0f;
  }
  options.causal = rng.chance(0.3);
  options.alignment = rng.pick({Alignment::top_left, Alignment::bottom_right});
  const auto side = [&] {
    return rng.pick<std::int64_t>({0, 1, 2, 3, 7, 16, 63, 200, std::int64_t{1} << 62});
  };
  if (rng.chance(0.2)) options.window.left = side();
  if (rng.chance(0.2)) options.window.right = side();
  if (rng.chance(0.2)) options.softcap = rng.pick({0.5f, 1.0f, 5.0f, 30.0f, 50.0f});
  if (rng.chance(0.2)) {
    options.dropout = {
        .probability = rng.pick({0.001f, 0.1f, 0.5f, 0.9f}), .seed = rng.bits(), .offset = rng.bits()};
  }
  options.deterministic = rng.chance(0.5);
}

// First chooses the deviation of the scores: from nearly equal scores to a softmax that saturates.
Magnitudes choose_magnitudes(Random& rng, const RandomProblem& p) {
  Magnitudes magnitudes{.scores = rng.pick({0.03, 1.0, 1.0, 1.0, 5.0, 30.0, 100.0}),
                        .qk = 1,
                        .v = rng.pick({0.01, 1.0, 1.0, 8.0}),
                        .d_o = rng.pick({0.01, 1.0, 1.0, 8.0})};
  // The largest f16 number is 65504, and gradients grow with v·d_o.
  if (p.dtype == DType::f16) magnitudes.d_o = std::min(magnitudes.d_o, 8 / magnitudes.v);
  const double root = std::sqrt(static_cast<double>(p.dim_qk));
  const double scale = std::abs(static_cast<double>(p.options.scale.value_or(0.0f)));
  const double score_of_ones = scale > 0 ? root * scale : 1;
  magnitudes.qk = std::clamp(std::sqrt(magnitudes.scores / score_of_ones), 1e-3, 30.0);
  return magnitudes;
}

void make_head_values(Random& rng, RandomProblem& p, const Magnitudes& magnitudes) {
  if (rng.chance(0.2)) {
    const Shape shape = rng.chance(0.5) ? Shape{p.heads_q} : Shape{p.batch, p.heads_q};
    p.alibi_slopes = random_buffer(rng, DType::f32, shape, input_values);
    std::vector<double> slopes(static_cast<std::size_t>(p.alibi_slopes.size()));
    for (double& slope : slopes) slope = std::exp2(-rng.uniform(0, 8)) * (rng.chance(0.05) ? -1 : 1);
    p.alibi_slopes.set_values(slopes);
  }
  if (rng.chance(0.2)) {
    p.sinks = random_buffer(rng, DType::f32, {p.heads_q}, input_values);
    std::vector<double> logits(static_cast<std::size_t>(p.heads_q));
    for (double& logit : logits) {
      logit = rng.chance(0.05) ? -std::numeric_limits<double>::infinity() : magnitudes.scores * rng.normal();
    }
    p.sinks.set_values(logits);
  }
  if (rng.chance(0.2)) {
    p.logit_scale = random_buffer(rng, DType::f32, {p.heads_q}, input_values);
    std::vector<double> factors(static_cast<std::size_t>(p.heads_q));
    for (double& factor : factors) {
      factor = rng.chance(0.05) ? 0 : rng.log_uniform(0.25, 4) * (rng.chance(0.1) ? -1 : 1);
    }
    p.logit_scale.set_values(factors);
  }
}

RandomProblem random_problem(std::uint64_t seed) {
  Random rng(seed);
  return random_problem(rng, seed, usual_cost);
}

RandomProblem random_problem(Random& rng, std::uint64_t seed, double max_cost) {
  RandomProblem problem;
  problem.seed = seed;
  choose_shape(rng, problem, max_cost);
  choose_options(rng, problem);
  const Magnitudes magnitudes = choose_magnitudes(rng, problem);
  make_tensors(rng, problem, magnitudes);
  make_masks(rng, problem, magnitudes);
  make_head_values(rng, problem, magnitudes);
  choose_asked(rng, problem);
  return problem;
}

RandomProblem widened(const RandomProblem& problem) {
  RandomProblem wide = problem;
  wide.dtype = DType::f64;
  for (Buffer* buffer :
       {&wide.q, &wide.k, &wide.v, &wide.mask, &wide.sinks, &wide.logit_scale, &wide.d_o, &wide.d_lse}) {
    if (!buffer->given() || buffer->dtype() == DType::boolean) continue;
    Buffer copy(DType::f64, buffer->shape());
    copy.set_values(buffer->values());
    *buffer = copy;
  }
  wide.asked = {.backward = wide.asked.backward,
                .dmask = wide.mask.given() && wide.mask.dtype() == DType::f64,
                .dsinks = wide.sinks.given(),
                .dlogit_scale = wide.logit_scale.given(),
                .dmask_dtype = DType::f64};
  return wide;
}

AttentionInputs RandomProblem::inputs() const {
  return {.q = q.view(),
          .k = k.view(),
          .v = v.view(),
          .mask = mask.view(),
          .alibi_slopes = alibi_slopes.view(),
          .sinks = sinks.view(),
          .logit_scale = logit_scale.view(),
          .key_lengths = key_lengths.view(),
          .page_table = page_table.view(),
          .dropout_seed = dropout_seed.view(),
          .packed = {.cumulative_q = cumulative_q.view(),
                     .cumulative_k = cumulative_k.view(),
                     .max_length_q = length_q,
                     .max_length_k = length_k},
          .blocks = {.block_q = blocks.block_q,
                     .block_k = blocks.block_k,
                     .counts = blocks.counts.view(),
                     .indices = blocks.indices.view(),
                     .full_counts = blocks.full_counts.view(),
                     .full_indices = blocks.full_indices.view(),
                     .tile_ids = blocks.tile_ids.view(),
                     .tiles = blocks.tiles.view()}};
}

Shape RandomProblem::beside_q(std::int64_t dim) const {
  return layout == Layout::packed ? Shape{q.extent(0), heads_q, dim} : Shape{batch, heads_q, length_q, dim};
}

Shape RandomProblem::statistics_shape() const {
  return layout == Layout::packed ? Shape{heads_q, q.extent(0)} : Shape{batch, heads_q, length_q};
}

AttentionOutputs OutputBuffers::view(bool with_lse) const {
  return {.o = o.view(), .lse = with_lse ? lse.view() : Tensor{}};
}

namespace {
PlacementRules result_rows(const RandomProblem& p) {
  return p.aligned_results ? aligned_rows(0) : output_rows;
}
}  // namespace

OutputBuffers make_outputs(const RandomProblem& p) {
  Random rng(p.seed + 1);
  OutputBuffers outputs;
  outputs.o = random_buffer(rng, p.dtype, p.beside_q(p.dim_v), result_rows(p));
  outputs.lse = random_buffer(rng, p.dtype == DType::f64 ? DType::f64 : DType::f32, p.statistics_shape(),
                              output_values);
  return outputs;
}

GradientBuffers make_gradients(const RandomProblem& p) {
  Random rng(p.seed + 2);
  GradientBuffers gradients;
  if (p.asked.packed_outputs) {
    const Shape shapes[] = {p.q.shape(), p.k.shape(), p.v.shape()};
    std::vector<Buffer> slices = Buffer::side_by_side(p.dtype, shapes);
    if (p.asked.dq) gradients.dq = slices[0];
    if (p.asked.dk) gradients.dk = slices[1];
    if (p.asked.dv) gradients.dv = slices[2];
  } else {
    if (p.asked.dq) gradients.dq = random_buffer(rng, p.dtype, p.q.shape(), result_rows(p));
    if (p.asked.dk) gradients.dk = random_buffer(rng, p.dtype, p.k.shape(), result_rows(p));
    if (p.asked.dv) gradients.dv = random_buffer(rng, p.dtype, p.v.shape(), result_rows(p));
  }
  if (p.asked.dmask) {
    gradients.dmask = random_buffer(rng, p.asked.dmask_dtype, p.mask.shape(), output_values);
  }
  if (p.asked.dsinks) gradients.dsinks = random_buffer(rng, p.sinks.dtype(), p.sinks.shape(), output_values);
  if (p.asked.dlogit_scale) {
    gradients.dlogit_scale = random_buffer(rng, p.logit_scale.dtype(), p.logit_scale.shape(), output_values);
  }
  return gradients;
}

}  // namespace tilewise::test
