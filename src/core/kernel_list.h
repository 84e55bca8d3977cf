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

/// How a kernel computes a call. It is chosen when the call is planned and used when it is launched.
struct Configuration {
  std::size_t workspace_bytes = 0;  ///< from an aligned address on
  int row = -1;                     ///< row of the kernel's tuning table
  int heads_log2 = 0;               ///< for decoding: log2 of the heads that packed GQA joins
  int splits = 0;                   ///< for decoding: split-KV
};

/// An implementation of an operation. A problem says what is asked. A call holds the checked arguments, and
/// the problem in its field `problem`. If an operation has two passes, its kernels compute both, and the
/// problem says which one.
template <typename ProblemOf, typename CallOf>
struct Kernel {
  using Problem = ProblemOf;
  using Call = CallOf;
  std::string_view name;
  /// Empty if the kernel can compute the problem, else the reason why not.
  std::string (*supports)(const Problem&);
  /// The bytes of workspace for the call.
  std::size_t (*workspace)(const Call&, const Context&) = nullptr;
  /// Runs the call, which was checked and is supported; context.workspace is large enough and aligned to 64.
  void (*launch)(const Call&, const Context&) = nullptr;
  /// Why "auto" prefers a later kernel that can compute the problem, too. Empty if it does not; may be null.
  std::string (*yields)(const Problem&) = nullptr;
  /// What part of the problem is not yet proven or timed on a GPU. Empty if nothing; may be null. Such a
  /// problem is on trial: the kernel takes it only when it is named, and only with TILEWISE_TRIAL=1.
  std::string (*trial)(const Problem&) = nullptr;
  /// In place of `workspace` and `launch`, for kernels that are compiled in several configurations.
  Configuration (*configure)(const Call&, const Context&) = nullptr;
  void (*launch_configured)(const Call&, const Configuration&, const Context&) = nullptr;
};

// The kernels of an operation are in one list, fastest first, the plain reference last. The choice walks that
// list.

/// The caller's workspace may have any alignment. Kernels get it aligned to a cache line.
inline constexpr std::size_t workspace_alignment = 64;

/// Whether a context's workspace is aligned and holds `needed` bytes. If so, the context need not be copied,
/// which is not cheap.
bool has_aligned_workspace(const Context& context, std::size_t needed);
/// A copy of the context with an aligned workspace. `needed` includes the padding for alignment. Throws
/// InvalidArgument if the caller's workspace is too small.
Context with_aligned_workspace(const Context& context, std::size_t needed);

/// Throws DeviceError with the message that a plan of several kernels was made before use_tuning().
[[noreturn]] void reject_stale_plan();

/// The rows that measurements choose for the tuning questions that `ask` puts, as a text that begins with
/// `before`. Empty if there are none.
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

/// What a kernel that can compute the problem has on trial; empty if nothing.
template <typename K>
std::string trial_of(const K& kernel, const typename K::Problem& problem) {
  return kernel.trial == nullptr ? std::string() : kernel.trial(problem);
}

/// Calls `ask` with the problem by which kernels are preferred: the problem itself or, if it is to be
/// batch_invariant, its representative, and then the answer says so.
template <typename Problem, typename Ask>
std::string asked_of_usual(const Problem& problem, const Ask& ask) {
  if constexpr (requires { problem.batch_invariant; }) {
    if (problem.batch_invariant) {
      const std::string answer = ask(representative(problem));
      return answer.empty() ? answer : "batch_invariant: " + answer;
    }
  }
  return ask(problem);
}

/// The problem by which tiles and splits are chosen where it is not the problem itself, as a text that begins
/// with `before`.
template <typename Problem>
std::string usual_problem(std::string_view before, const Problem& problem) {
  if constexpr (requires { problem.batch_invariant; }) {
    if (problem.batch_invariant) {
      return std::string(before) + "batch_invariant: as for " + to_string(representative(problem));
    }
  }
  return {};
}

/// Why "auto" prefers a later kernel; empty if it does not.
template <typename K>
std::string reason_to_yield(const K& kernel, const typename K::Problem& problem) {
  if (kernel.yields == nullptr) return {};
  return asked_of_usual(problem, [&](const typename K::Problem& asked) { return kernel.yields(asked); });
}

/// Why a kernel may not be chosen if the caller asked for `name`; empty if it may.
template <typename K>
std::string reason_against(const K& kernel, const typename K::Problem& problem, std::string_view name) {
  std::string reason = kernel.supports(problem);
  if (!reason.empty()) return reason;
  if constexpr (requires { problem.batch_invariant; }) {
    if (problem.batch_invariant) {
      reason =
          asked_of_usual(problem, [&](const typename K::Problem& asked) { return kernel.supports(asked); });
      if (!reason.empty()) return reason;
    }
  }
  const std::string trial = trial_of(kernel, problem);
  if (trial.empty() || (name == kernel.name && allows_trials())) return {};
  return "trial: runs " + trial + " only when named and with TILEWISE_TRIAL=1";
}

/// The kernel of that name or, for "auto", the first that can compute the problem and does not yield; if all
/// of them yield, the first of them. Null if no kernel can; then `reasons` say why.
template <typename K>
const K* find_kernel(std::span<const K> kernels, const typename K::Problem& problem, std::string_view name,
                     std::string& reasons) {
  const K* yielding = nullptr;
  for (const K& kernel : kernels) {
    if (name != "auto" && name != kernel.name) continue;
    const std::string reason = reason_against(kernel, problem, name);
    if (!reason.empty()) {
      reasons += "\n  " + std::string(kernel.name) + ": " + reason;
    } else if (name == "auto" && !reason_to_yield(kernel, problem).empty()) {
      if (yielding == nullptr) yielding = &kernel;
    } else {
      return &kernel;
    }
  }
  return yielding;
}

/// The same, but throws Unsupported, with the reasons, if no kernel can compute the problem.
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
/// Launches another kernel from inside a kernel, in the part of its workspace that it reserved for this when
/// it was planned. Throws DeviceError if the other kernel needs more workspace now, which may happen after
/// use_tuning().
template <typename K>
void launch_inner(const K& kernel, const typename K::Call& call, const Context& context) {
  const Configuration configuration = configure_kernel(kernel, call, context);
  if (configuration.workspace_bytes > context.workspace.bytes) reject_stale_plan();
  launch_kernel(kernel, call, configuration, context);
}

/// The bytes of workspace that a caller must provide for a configuration, at any address.
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
      reason += usual_problem(reason.empty() ? "" : "; ", problem);
      reason += measured_rows(reason.empty() ? "" : "; ", [&] { configure_kernel(kernel, call, context); });
    } else {
      reason = reason_to_yield(kernel, problem);
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
