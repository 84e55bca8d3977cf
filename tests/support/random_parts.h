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

/// q, k and v with lengths, pages or sequences; d_o and d_lse.
void make_tensors(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);
/// mask and blocks.
void make_masks(Random& rng, RandomProblem& problem, const Magnitudes& magnitudes);

}  // namespace tilewise::test
