#pragma once

#include "support/random_problem.h"

// The steps of random_problem(), in their order.
namespace tilewise::test {

/// Deviations of the values.
struct Magnitudes {
  double scores;
  double qk;
  double v;
  double d_o;
};

/// What does not depend on data: scale, causal and window, softcap, dropout.
void choose_options(Random& rng, RandomProblem& problem);
Magnitudes choose_magnitudes(Random& rng, const RandomProblem& problem);
/// q, k and v with lengths, pages or sequences; d_o and d_lse.
void make_tensors(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// mask and blocks.
void make_masks(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// An additive mask in the place of whatever was there, broadcast in any way.
void make_additive_mask(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// The lists and tiles of blocks, whose sizes have been chosen: each key block of each row of query blocks is
/// hidden, full or partial.
void make_blocks(Random& rng, RandomProblem& problem);
/// The same contents, of rows that begin at multiples of 16 bytes.
Buffer with_aligned_rows(const Buffer& buffer);
/// ALiBi's slopes and sinks.
void make_head_values(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// Which gradients are wanted, and in what form.
void choose_asked(Random& rng, RandomProblem& problem);

}  // namespace tilewise::test
