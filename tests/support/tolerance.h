#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "support/open_problem.h"

namespace tilewise::test {

// The tolerance of kernels. The contract allows at most twice the error that PyTorch's math path makes in the
// same precision, both for the largest error in a tensor and for the norm of all errors. The error of that
// path on this problem is known (math_path), but it is a single draw: in a tensor of few elements it can be
// small by luck. So a result that misses the bound is compared again with the worst of several draws, which
// are the path's errors on neighbouring problems (OpenProblem::neighbour). In large tensors all draws are
// similar, so few are made and the bound hardly grows. What the path computes exactly, it computes exactly in
// every draw.

/// The path with which a kernel's errors are compared for f16 and bf16. strict: the math path, which computes
/// in f32. standard: the path with 16-bit products (half_path). For f32 both are the math path.
enum class Rule { strict, standard };

/// The errors of a tensor.
struct Errors {
  double largest = 0;
  double norm = 0;
};

/// An approximate upper bound on the terms of each result. It is 0 where a result must be exact: for rows,
/// keys and mask elements without any visible pair.
Results term_sizes(const OpenProblem& problem);

/// The truth of a tensor, and the sizes of its terms.
struct Expectation {
  std::string name;
  std::vector<double> truth;
  std::vector<double> sizes;
};

/// The allowed errors: twice `math`, and at least half a unit in the last place, since results are rounded:
/// that of the largest element for the largest error, and that of each element for the norm. The error of the
/// truth itself, which is f64, is added.
Errors allowed_errors(const Expectation& expectation, const Errors& math, DType dtype);

/// Empty if `got` is as expected, else a text about the worst element or the norm.
std::string mismatch(const Expectation& expectation, const Errors& allowed, const Buffer& got);

/// The errors of a rule's path, for each result.
class MathPathErrors {
 public:
  /// Makes the first draw, which is the problem itself. Further draws use `threads` threads.
  MathPathErrors(const OpenProblem& open, const Results& truth, int threads = 1, Rule rule = Rule::strict);

  /// The worst errors of all draws so far. Where the path overflows, though a kernel need not, there is no
  /// error.
  const Errors& of(std::vector<double> Results::* result) const;

  /// Empty if `got` is within the contract, else a text about the difference. Makes more draws if needed.
  std::string mismatch(const Expectation& expectation, std::vector<double> Results::* result,
                       const Buffer& got);

 private:
  using ByResult = std::array<Errors, Results::members.size()>;
  ByResult draw(const OpenProblem& open, const Results& truth) const;
  void draw_more();  // doubles the number of draws

  OpenProblem open_;
  int threads_;
  Rule rule_;
  ByResult worst_;
  int draws_ = 1;
};

}  // namespace tilewise::test
