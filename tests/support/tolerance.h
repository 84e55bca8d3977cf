#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "support/buffer.h"
#include "support/open_problem.h"

namespace tilewise::test {

// How far a kernel may be from the truth: the contract's "at most twice the error that PyTorch's math path
// makes in the same precision", for the largest error in a tensor and for the norm of all. What that path
// makes of this very problem is known (math_path), but it is one draw: in a tensor of few elements it is
// right by luck now and then. So what misses the bound is measured once more against the worst of several
// draws, the path's errors on neighbouring problems (OpenProblem::neighbour). Of many elements all draws are
// alike, so nothing is given away there, and few are made; and what the path computes without any error, it
// does so in every draw.

/// Which path a kernel's errors are measured against, for f16 and bf16: strict is the math path, which
/// computes in f32; standard has products of 16 bits (half_path). For f32 both are the math path.
enum class Rule { strict, standard };

/// Distances of a tensor from its truth.
struct Errors {
  double largest = 0;
  double norm = 0;
};

/// The size that the terms of each result have at most, roughly; zero where a result must be exact: rows,
/// keys and mask elements that take part in nothing.
Results term_sizes(const OpenProblem& problem);

/// The truth of a tensor, and which of its elements must be exact.
struct Expectation {
  std::string name;
  std::vector<double> truth;
  std::vector<double> sizes;
};

/// What is allowed around the truth: twice `math`, and at least half a unit in the last place, the unit of
/// the largest element for the largest error and that of each for the norm: a result has to be rounded.
/// The truth is in f64, and no better known than that.
Errors allowed_errors(const Expectation& expectation, const Errors& math, DType dtype);

/// Empty when `got` is as expected, else the worst element or the norm.
std::string mismatch(const Expectation& expectation, const Errors& allowed, const Buffer& got);

/// What the errors of a rule's path are, by result.
class MathPathErrors {
 public:
  /// The first draw: the problem as it stands. More are drawn by so many threads.
  MathPathErrors(const OpenProblem& open, const Results& truth, int threads = 1, Rule rule = Rule::strict);

  /// The worst of all draws so far. What the path cannot represent (it overflows where a kernel need not)
  /// counts as no error.
  const Errors& of(std::vector<double> Results::* result) const;

  /// Empty when `got` is within the contract, else what it misses. Draws more where that is needed.
  std::string mismatch(const Expectation& expectation, std::vector<double> Results::* result,
                       const Buffer& got);

 private:
  using ByResult = std::array<Errors, Results::members.size()>;
  ByResult draw(const OpenProblem& open, const Results& truth) const;
  void draw_more();  // as many again

  OpenProblem open_;
  int threads_;
  Rule rule_;
  ByResult worst_;
  int draws_ = 1;
};

}  // namespace tilewise::test
