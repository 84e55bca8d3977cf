#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "core/matrix.h"
#include "core/plan_access.h"
#include "tilewise/attention.h"
#include "tilewise/ffn.h"
#include "tilewise/gemm.h"
#include "tilewise/norm.h"
#include "tilewise/rope.h"

namespace tilewise {

// Visitors of a layer's operations. A pass walks over its operations; PlannedSteps and Explain take the same
// walk to plan and run them, and to explain them. Besides the public operations there are two small ones,
// which explanations leave out.

/// sums[n] = Σ_m x[m][n]
struct RowSum {
  Matrix x;
  Vector sums;
};
/// to += x
struct Addition {
  Matrix x;
  Matrix to;
};

void launch_step(const RowSum& step, const Context& context);
void launch_step(const Addition& step, const Context& context);
std::size_t step_workspace(const RowSum& step, const Context& context);

/// The operations of a pass, each checked and planned once, in their order.
class PlannedSteps {
 public:
  explicit PlannedSteps(const Context& context) : context_(context) {}

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    add(plan_norm_forward(i, o, to, context_));
  }
  void operator()(const NormInputs& i, const NormOptions& o, const NormGradients& to) {
    add(plan_norm_backward(i, o, to, context_));
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    add(plan_gemm(i, o, to, context_));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    add(plan_ffn_forward(i, o, to, context_));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnGradients& to) {
    add(plan_ffn_backward(i, o, to, context_));
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    add(plan_rope(i, o, to, context_));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    add(plan_attention_forward(i, o, to, context_));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionGradients& to) {
    add(plan_attention_backward(i, o, to, context_));
  }
  void operator()(const RowSum& step) { add_small(step, step_workspace(step, context_)); }
  void operator()(const Addition& step) { add_small(step, 0); }

  /// The largest workspace that an operation needs.
  std::size_t workspace_bytes() const { return bytes_; }
  /// Checks the contents of index tensors, as PlannedCall::check does.
  void check(const Context& context) const {
    for (const auto& step : steps_) step->check(context);
  }
  /// Runs all steps, which must have been checked.
  void launch(const Context& context) const {
    for (const auto& step : steps_) step->launch(context);
  }

 private:
  struct Step {
    virtual ~Step() = default;
    virtual void check(const Context& context) const = 0;
    virtual void launch(const Context& context) const = 0;
  };
  template <typename P>
  struct PlanStep final : Step {
    P plan;
    explicit PlanStep(const P& plan_) : plan(plan_) {}
    void check(const Context& context) const override { PlanAccess::check(plan, context); }
    void launch(const Context& context) const override { PlanAccess::launch(plan, context); }
  };
  template <typename S>
  struct SmallStep final : Step {
    S step;
    explicit SmallStep(const S& step_) : step(step_) {}
    void check(const Context&) const override {}
    void launch(const Context& context) const override { launch_step(step, context); }
  };

  template <typename P>
  void add(const P& plan) {
    bytes_ = std::max(bytes_, plan.workspace_bytes());
    steps_.push_back(std::make_unique<PlanStep<P>>(plan));
  }
  template <typename S>
  void add_small(const S& step, std::size_t needed) {
    bytes_ = std::max(bytes_, needed);
    steps_.push_back(std::make_unique<SmallStep<S>>(step));
  }

  const Context& context_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::size_t bytes_ = 0;
};

/// Explains the choice of kernel for each operation.
struct Explain {
  const Context& context;
  std::vector<Explanation> found{};

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    found.push_back(explain_norm_forward(i, o, to, context));
  }
  void operator()(const NormInputs& i, const NormOptions& o, const NormGradients& to) {
    found.push_back(explain_norm_backward(i, o, to, context));
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    found.push_back(explain_gemm(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    found.push_back(explain_ffn_forward(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnGradients& to) {
    found.push_back(explain_ffn_backward(i, o, to, context));
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    found.push_back(explain_rope(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    found.push_back(explain_attention_forward(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionGradients& to) {
    found.push_back(explain_attention_backward(i, o, to, context));
  }
  void operator()(const RowSum&) {}
  void operator()(const Addition&) {}
};

}  // namespace tilewise
