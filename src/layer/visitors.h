#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/matrix.h"
#include "tilewise/attention.h"
#include "tilewise/ffn.h"
#include "tilewise/gemm.h"
#include "tilewise/norm.h"
#include "tilewise/rope.h"

namespace tilewise {

// What may be done with the operations of a layer: a pass walks over them, and what is launched, measured and
// explained is the same walk. Besides the operations of the public face there are two small ones, which need
// no explanation.

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

/// The most that any of the operations needs.
struct Measure {
  const Context& context;
  std::size_t bytes = 0;

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    most(norm_forward_workspace(i, o, to, context));
  }
  void operator()(const NormInputs& i, const NormOptions& o, const NormGradients& to) {
    most(norm_backward_workspace(i, o, to, context));
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    most(gemm_workspace(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    most(ffn_forward_workspace(i, o, to, context));
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnGradients& to) {
    most(ffn_backward_workspace(i, o, to, context));
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    most(rope_workspace(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    most(attention_forward_workspace(i, o, to, context));
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionGradients& to) {
    most(attention_backward_workspace(i, o, to, context));
  }
  void operator()(const RowSum& step) { most(step_workspace(step, context)); }
  void operator()(const Addition&) {}

 private:
  void most(std::size_t needed) { bytes = std::max(bytes, needed); }
};

struct Launch {
  const Context& context;

  void operator()(const NormInputs& i, const NormOptions& o, const NormOutputs& to) {
    norm_forward(i, o, to, context);
  }
  void operator()(const NormInputs& i, const NormOptions& o, const NormGradients& to) {
    norm_backward(i, o, to, context);
  }
  void operator()(const GemmInputs& i, const GemmOptions& o, const GemmOutputs& to) {
    gemm(i, o, to, context);
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnOutputs& to) {
    ffn_forward(i, o, to, context);
  }
  void operator()(const FfnInputs& i, const FfnOptions& o, const FfnGradients& to) {
    ffn_backward(i, o, to, context);
  }
  void operator()(const RopeInputs& i, const RopeOptions& o, const RopeOutputs& to) {
    rope(i, o, to, context);
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionOutputs& to) {
    attention_forward(i, o, to, context);
  }
  void operator()(const AttentionInputs& i, const AttentionOptions& o, const AttentionGradients& to) {
    attention_backward(i, o, to, context);
  }
  void operator()(const RowSum& step) { launch_step(step, context); }
  void operator()(const Addition& step) { launch_step(step, context); }
};

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
