#pragma once

#include "support/random_problem.h"

// The steps of random_problem(), in order.
namespace tilewise::test {

/// Standard deviations of values.
struct Magnitudes {
  double scores;
  double qk;
  double v;
  double d_o;
};

/// Chooses options: scale, causal and window, softcap, dropout.
void choose_options(Random& rng, RandomProblem& problem);
Magnitudes choose_magnitudes(Random& rng, const RandomProblem& problem);
/// Makes q, k and v with lengths, pages or sequences; d_o and d_lse.
void make_tensors(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// Makes mask and blocks.
void make_masks(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// Makes an additive mask with any broadcasting, which replaces the mask that was there.
void make_additive_mask(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// Makes lists and tiles for blocks whose sizes were chosen. Each key block of each row of query blocks is
/// hidden, full or partial.
void make_blocks(Random& rng, RandomProblem& problem);
/// A copy whose rows begin at multiples of 16 bytes.
Buffer with_aligned_rows(const Buffer& buffer);
/// Makes ALiBi slopes, sinks and logit scales.
void make_head_values(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// Chooses which gradients are asked for, and in what form.
void choose_asked(Random& rng, RandomProblem& problem);

}  // namespace tilewise::test
