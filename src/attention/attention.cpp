#include "tilewise/attention.h"

#include <cstdint>

#include "attention/kernel.h"
#include "attention/validate.h"
#include "core/check.h"

namespace tilewise {
namespace {

// The caller's workspace may stand anywhere; kernels get it aligned to a cache line.
constexpr std::size_t workspace_alignment = 64;

std::size_t workspace_for(const AttentionKernel& kernel, const AttentionCall& call, const Context& context) {
  const std::size_t bytes = kernel.workspace(call, context);
  return bytes == 0 ? 0 : bytes + workspace_alignment - 1;
}

void launch(const AttentionCall& call, const AttentionOptions& options, const Context& context) {
  const AttentionKernel& kernel = choose_attention_kernel(call.problem, options.kernel);
  const std::size_t needed = workspace_for(kernel, call, context);
  check(
      context.workspace.bytes >= needed && (needed == 0 || context.workspace.data != nullptr), "workspace",
      [&] { return "at least " + std::to_string(needed) + " bytes"; },
      [&] {
        return context.workspace.data == nullptr ? "none"
                                                 : std::to_string(context.workspace.bytes) + " bytes";
      });
  Context aligned = context;
  const auto address = reinterpret_cast<std::uintptr_t>(context.workspace.data);
  const std::uintptr_t padding = -address % workspace_alignment;
  if (needed != 0) {
    aligned.workspace = {static_cast<std::byte*>(context.workspace.data) + padding, needed - padding};
  }
  kernel.launch(call, aligned);
}

std::size_t workspace(const AttentionCall& call, const AttentionOptions& options, const Context& context) {
  return workspace_for(choose_attention_kernel(call.problem, options.kernel), call, context);
}

Explanation explain(const AttentionCall& call, const AttentionOptions& options) {
  check_kernel_name(options.kernel);
  Explanation explanation{.problem = to_string(call.problem), .entries = {}};
  bool chosen = false;
  for (const AttentionKernel& kernel : attention_kernel_list()) {
    const std::string reason = kernel.supports(call.problem);
    const bool named = options.kernel == "auto" || options.kernel == kernel.name;
    auto verdict = Explanation::Verdict::able;
    if (!reason.empty()) {
      verdict = Explanation::Verdict::unable;
    } else if (named && !chosen) {
      verdict = Explanation::Verdict::chosen;
      chosen = true;
    }
    explanation.entries.push_back({std::string(kernel.name), verdict, reason});
  }
  return explanation;
}

}  // namespace

void attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context) {
  launch(checked_forward(inputs, options, outputs, context), options, context);
}

void attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context) {
  launch(checked_backward(inputs, options, gradients, context), options, context);
}

std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                        const AttentionOutputs& outputs, const Context& context) {
  return workspace(checked_forward(inputs, options, outputs, context), options, context);
}

std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                         const AttentionGradients& gradients, const Context& context) {
  return workspace(checked_backward(inputs, options, gradients, context), options, context);
}

Explanation explain_attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                                      const AttentionOutputs& outputs, const Context& context) {
  return explain(checked_forward(inputs, options, outputs, context), options);
}

Explanation explain_attention_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                                       const AttentionGradients& gradients, const Context& context) {
  return explain(checked_backward(inputs, options, gradients, context), options);
}

std::string to_string(const Explanation& explanation) {
  std::string text = explanation.problem + "\n";
  for (const Explanation::Entry& entry : explanation.entries) {
    text += "  " + entry.kernel + ": ";
    switch (entry.verdict) {
      case Explanation::Verdict::chosen: text += "chosen"; break;
      case Explanation::Verdict::able: text += "able"; break;
      case Explanation::Verdict::unable: text += "cannot: " + entry.reason; break;
    }
    text += "\n";
  }
  return text;
}

}  // namespace tilewise
