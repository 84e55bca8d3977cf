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

/// What is tested: a kernel of the library at a SIMD level, or one made wrong on purpose.
struct Subject {
  std::string kernel;
  Device device{};
  std::string level{};    ///< empty: the best
  double repetition = 1;  ///< chance of the second run, which must give the same bits
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&, Context)>
      forward = run_forward;
  std::function<void(const AttentionInputs&, const AttentionOptions&, const AttentionGradients&, Context)>
      backward = run_backward;
};

/// Which passes of a subject were run.
struct Passes {
  bool forward = false;
  bool backward = false;
  bool backward_again = false;  ///< which must give the same bits
};

/// The rule that a kernel is held to: kernels with products of 16 bits to the standard one, unless strict
/// precision is asked for; all others to the strict one, since they compute in f32.
Rule rule_of(const std::string& kernel, const AttentionOptions& options);

/// One problem, its truth by the reference kernel in f64, and what kernels may be off.
class Checker {
 public:
  /// Without a rule, a kernel is held to its own (rule_of).
  Checker(const RandomProblem& problem, int threads, std::optional<Rule> rule = {});

  /// Failures of the reference itself: it must agree with the formula as the tests have written it down.
  const std::vector<std::string>& reference_failures() const { return reference_failures_; }

  /// Whether there are gradients to be asked for.
  bool differentiable() const { return differentiable_; }

  /// Both passes of a subject, as far as it can take them: that results are right, that all and only they are
  /// written, and that another run with another number of threads gives the same bits. Gives the failures,
  /// and what was run where that is asked for.
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
  mutable std::optional<MathPathErrors> strict_errors_, standard_errors_;  // draw more where that is needed
};

}  // namespace tilewise::test
