#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/debug.h"
#include "core/pass.h"
#include "tilewise/context.h"
#include "tilewise/explain.h"

namespace tilewise {

/// How a kernel computes a call: decided when the call is planned, obeyed when it is launched.
struct Configuration {
  std::size_t workspace_bytes = 0;  ///< at an aligned address
  int row = -1;                     ///< of the kernel's tuning table
  int heads_log2 = 0;               ///< of decoding: packed heads
  int splits = 0;                   ///< of decoding: of the keys of a tile
};

/// One way to compute an operation. A problem says what is asked, a call holds the checked arguments and the
/// problem in its field `problem`. Where an operation has two passes, its kernels do both, and the problem
/// says which is asked.
template <typename ProblemOf, typename CallOf>
struct Kernel {
  using Problem = ProblemOf;
  using Call = CallOf;
  std::string_view name;
  /// Empty when it can take the problem, else the reason why not.
  std::string (*supports)(const Problem&);
  /// Bytes of workspace for the call.
  std::size_t (*workspace)(const Call&, const Context&) = nullptr;
  /// Runs the call, which was checked and is supported; context.workspace is large enough and aligned to 64.
  void (*launch)(const Call&, const Context&) = nullptr;
  /// Why "auto" takes a later kernel that can instead; empty, or null, where it does not.
  std::string (*yields)(const Problem&) = nullptr;
  /// What of the problem no GPU has run yet; empty, or null, where there is nothing. Such a problem is on
  /// trial: the kernel takes it only by its name, and only with TILEWISE_TRIAL=1.
  std::string (*trial)(const Problem&) = nullptr;
  /// In place of `workspace` and `launch`, for a kernel that is compiled in several configurations.
  Configuration (*configure)(const Call&, const Context&) = nullptr;
  void (*launch_configured)(const Call&, const Configuration&, const Context&) = nullptr;
};

// An operation's kernels stand in one list, fastest first, the plain reference last. Choosing walks it.

/// The caller's workspace may stand anywhere; kernels get it aligned to a cache line.
inline constexpr std::size_t workspace_alignment = 64;

/// Whether a context's workspace holds `needed` bytes and is aligned already. Then it needs no copy, and a
/// copy of a context is not cheap.
bool has_aligned_workspace(const Context& context, std::size_t needed);
/// A context whose workspace is aligned and holds `needed` bytes, of which alignment may take a part. Throws
/// InvalidArgument where the caller's is too small.
Context with_aligned_workspace(const Context& context, std::size_t needed);

/// Throws DeviceError: a plan of several kernels was made before use_tuning().
[[noreturn]] void reject_stale_plan();

/// What of the questions that `ask` puts to tuning tables was answered by a measurement, after `before`;
/// empty where nothing was.
std::string measured_rows(std::string_view before, const std::function<void()>& ask);

/// Throws InvalidArgument, listing the known names, unless `name` is "auto" or in the list.
template <typename K>
void check_kernel_name(std::span<const K> kernels, std::string_view name) {
  if (name == "auto") return;
  std::string names = "auto";
  for (const K& kernel : kernels) {
    if (name == kernel.name) return;
    names += ", " + std::string(kernel.name);
  }
  reject("kernel", "one of " + names, "'" + std::string(name) + "'");
}

/// What a kernel that can take the problem has on trial; empty where that is nothing.
template <typename K>
std::string trial_of(const K& kernel, const typename K::Problem& problem) {
  return kernel.trial == nullptr ? std::string() : kernel.trial(problem);
}

/// Why a kernel is not to be taken, where the caller asked for `name`; empty where it may be.
template <typename K>
std::string reason_against(const K& kernel, const typename K::Problem& problem, std::string_view name) {
  std::string reason = kernel.supports(problem);
  if (!reason.empty()) return reason;
  const std::string trial = trial_of(kernel, problem);
  if (trial.empty() || (name == kernel.name && allows_trials())) return {};
  return "trial: runs " + trial + " only when named and with TILEWISE_TRIAL=1";
}

/// The kernel of that name, or for "auto" the first able one that does not yield to another. Null where there
/// is none that can; then `reasons` say why.
template <typename K>
const K* find_kernel(std::span<const K> kernels, const typename K::Problem& problem, std::string_view name,
                     std::string& reasons) {
  const K* yielding = nullptr;
  for (const K& kernel : kernels) {
    if (name != "auto" && name != kernel.name) continue;
    const std::string reason = reason_against(kernel, problem, name);
    if (!reason.empty()) {
      reasons += "\n  " + std::string(kernel.name) + ": " + reason;
    } else if (name == "auto" && kernel.yields != nullptr && !kernel.yields(problem).empty()) {
      if (yielding == nullptr) yielding = &kernel;
    } else {
      return &kernel;
    }
  }
  return yielding;
}

/// The same, but throws Unsupported, with the reasons, when there is none that can.
template <typename K>
const K& choose_kernel(std::span<const K> kernels, const typename K::Problem& problem,
                       std::string_view name) {
  check_kernel_name(kernels, name);
  std::string reasons;
  if (const K* kernel = find_kernel(kernels, problem, name, reasons)) return *kernel;
  throw Unsupported("kernel '" + std::string(name) + "' cannot take this problem (" + to_string(problem) +
                    "):" + reasons);
}

template <typename K>
Configuration configure_kernel(const K& kernel, const typename K::Call& call, const Context& context) {
  if (kernel.configure != nullptr) return kernel.configure(call, context);
  return {.workspace_bytes = kernel.workspace(call, context)};
}
template <typename K>
void launch_kernel(const K& kernel, const typename K::Call& call, const Configuration& configuration,
                   const Context& context) {
  if (kernel.launch_configured != nullptr) return kernel.launch_configured(call, configuration, context);
  kernel.launch(call, context);
}
/// For kernels that launch others in a part of their workspace, for which they asked when they were planned.
/// Throws DeviceError if the other would now need more, which it may after use_tuning().
template <typename K>
void launch_inner(const K& kernel, const typename K::Call& call, const Context& context) {
  const Configuration configuration = configure_kernel(kernel, call, context);
  if (configuration.workspace_bytes > context.workspace.bytes) reject_stale_plan();
  launch_kernel(kernel, call, configuration, context);
}

/// What a caller must provide for a configuration.
constexpr std::size_t workspace_for(const Configuration& configuration) {
  const std::size_t bytes = configuration.workspace_bytes;
  return bytes == 0 ? 0 : bytes + workspace_alignment - 1;
}

template <typename K>
std::size_t kernel_workspace(std::span<const K> kernels, const typename K::Call& call, std::string_view name,
                             const Context& context) {
  return workspace_for(configure_kernel(choose_kernel(kernels, call.problem, name), call, context));
}

template <typename K>
Explanation explain_kernels(std::span<const K> kernels, const typename K::Call& call, std::string_view name,
                            const Context& context) {
  const typename K::Problem& problem = call.problem;
  check_kernel_name(kernels, name);
  Explanation explanation{.problem = to_string(problem), .entries = {}};
  std::string reasons;
  const K* chosen = find_kernel(kernels, problem, name, reasons);
  for (const K& kernel : kernels) {
    std::string reason = reason_against(kernel, problem, name);
    auto verdict = Explanation::Verdict::able;
    if (!reason.empty()) {
      verdict = Explanation::Verdict::unable;
    } else if (&kernel == chosen) {
      verdict = Explanation::Verdict::chosen;
      if (const std::string trial = trial_of(kernel, problem); !trial.empty()) reason = "trial: " + trial;
      reason += measured_rows(reason.empty() ? "" : "; ", [&] { configure_kernel(kernel, call, context); });
    } else if (kernel.yields != nullptr) {
      reason = kernel.yields(problem);
    }
    explanation.entries.push_back(Explanation::Entry{std::string(kernel.name), verdict, reason});
  }
  return explanation;
}

template <typename K>
std::vector<std::string_view> kernel_names(std::span<const K> kernels) {
  std::vector<std::string_view> names;
  for (const K& kernel : kernels) names.push_back(kernel.name);
  return names;
}

}  // namespace tilewise
