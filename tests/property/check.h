#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/device.h"
#include "support/open_problem.h"
#include "support/random_problem.h"
#include "support/tolerance.h"
#include "tilewise/attention.h"

namespace tilewise::test {

/// The kernel that is tested: one of the library at a SIMD level, or a deliberately wrong one.
struct Subject {
  std::string kernel;
  Device device{};
  std::string level{};    ///< empty: the best
  double repetition = 1;  ///< probability of a second run, which must give the same bits
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&, Context)>
      forward = run_forward;
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionGradients&, Context)>
      backward = run_backward;
};

/// The passes of a subject that were run.
struct Passes {
  bool forward = false;
  bool backward = false;
  bool backward_again = false;  ///< which must give the same bits
};

/// The rule for a kernel: standard for kernels with 16-bit products, unless strict precision is asked for;
/// strict for all others, since they compute in f32.
Rule rule_of(const std::string& kernel, const AttentionOptions& options);

/// A problem, its truth from the reference kernel in f64, and the allowed errors of kernels.
class Checker {
 public:
  /// Without `rule`, each kernel is checked by its own (rule_of).
  Checker(const RandomProblem& problem, int threads, std::optional<Rule> rule = {});

  /// Failures of the reference itself, which must agree with the formula in tests/support/math_path.cpp.
  const std::vector<std::string>& reference_failures() const { return reference_failures_; }

  /// Whether the problem has a backward pass.
  bool differentiable() const { return differentiable_; }

  /// Checks the passes that a subject can compute: results are right, all of them and nothing else is
  /// written, and a run with another number of threads gives the same bits. Returns the failures, and in
  /// `ran` the passes that were run.
  std::vector<std::string> check(const Subject& subject, Passes* ran = nullptr) const;

 private:
  struct Run;
  MathPathErrors& errors_of(Rule rule) const;
  void compare(Run& run, const char* pass, const char* name, std::vector<double> Results::* result,
               const Buffer& got) const;
  void check_forward(Run& run) const;
  void check_backward(Run& run) const;

  const RandomProblem& problem_;
  int threads_;
  bool differentiable_;
  std::vector<std::string> reference_failures_;
  Results sizes_;
  Results truth_;
  std::optional<Rule> rule_;
  mutable std::optional<MathPathErrors> strict_errors_, standard_errors_;  // they make more draws if needed
};

}  // namespace tilewise::test
