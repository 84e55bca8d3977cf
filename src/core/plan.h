#pragma once

#include <algorithm>
#include <new>
#include <span>
#include <string_view>

#include "core/debug.h"
#include "core/kernel_list.h"
#include "core/plan_access.h"

namespace tilewise {

/// The properties of the context on which a plan depends.
struct PlannedContext {
  Device device;
  int threads;
  std::string_view simd_level;  ///< refers to memory of the library

  explicit PlannedContext(const Context& context)
      : device(context.device),
        threads(counted(context)),
        simd_level(context.simd_level.empty() ? std::string_view() : lasting(context.simd_level)) {}

  /// Throws InvalidArgument unless a plan may run with that context.
  void check(const Context& context) const {
    const bool same_device = context.device == device;
    if (same_device && (device.type != Device::Type::cpu || suits_cpu(context))) return;
    reject(context);
  }

 private:
  static int counted(const Context& context) {
    return std::min(context.parallel_for.threads, ParallelFor::most_threads);
  }
  static std::string_view lasting(std::string_view level);
  bool suits_cpu(const Context& context) const {
    return counted(context) >= 1 && counted(context) <= threads && context.parallel_for.run != nullptr &&
           context.simd_level == simd_level;
  }
  [[noreturn]] void reject(const Context& context) const;
};

/// A checked call and the kernel that was chosen for it.
template <typename K>
struct PlannedCall {
  typename K::Call call;
  std::span<const K> kernels;
  const K* kernel;
  bool automatic;  ///< whether the caller named no kernel
  Configuration configuration;
  std::size_t workspace_bytes;  ///< that the caller must provide, at any address
  PlannedContext planned;

  /// Plans the call that `checked()` returns, which is constructed in place since calls are large. Throws
  /// Unsupported, with the reasons, if no kernel of that name can compute it.
  template <typename Checked>
  PlannedCall(std::span<const K> list, std::string_view name, const Context& context, const Checked& checked)
      : call(checked()),
        kernels(list),
        kernel(&choose_kernel(list, call.problem, name)),
        automatic(name == "auto"),
        configuration(configure_kernel(*kernel, call, context)),
        workspace_bytes(workspace_for(configuration)),
        planned(context) {}

  Explanation explain() const {
    Context context{.device = planned.device, .parallel_for = serial_parallel_for()};
    context.parallel_for.threads = planned.threads;
    context.simd_level = planned.simd_level;
    return explain_kernels(kernels, call, automatic ? "auto" : kernel->name, context);
  }

  /// Checks the context and the contents of index tensors, and throws if they are wrong. Writes nothing.
  void check(const Context& context) const {
    planned.check(context);
    if constexpr (requires { check_indices(call, context); }) check_indices(call, context);
  }
  void run(const Context& context) const {
    check(context);
    launch(context);
  }
  /// For a plan that was made with Contents::checked and the same context, so that on the CPU everything is
  /// checked.
  void run_once(const Context& context) const {
    if (context.device.type != Device::Type::cpu) check(context);
    launch(context);
  }
  /// Runs a call that was checked, and logs the launch if TILEWISE_LOG asks for it.
  void launch(const Context& context) const {
    if (logs_launches()) {
      const char* operation = "";
      if constexpr (requires { operation_of(call.problem); }) operation = operation_of(call.problem);
      log_launch(operation, to_string(call.problem), kernel->name);
    }
    if (has_aligned_workspace(context, workspace_bytes)) {
      launch_kernel(*kernel, call, configuration, context);
    } else {
      launch_kernel(*kernel, call, configuration, with_aligned_workspace(context, workspace_bytes));
    }
  }
};

// The members of Plan. The source of an operation defines Plan<…>::State, with a member `planned` that is a
// PlannedCall, and instantiates Plan<…>.

template <typename Inputs, typename Outputs>
const typename Plan<Inputs, Outputs>::State& Plan<Inputs, Outputs>::state() const {
  return *std::launder(reinterpret_cast<const State*>(state_));
}
template <typename Inputs, typename Outputs>
std::string_view Plan<Inputs, Outputs>::kernel() const {
  return state().planned.kernel->name;
}
template <typename Inputs, typename Outputs>
std::size_t Plan<Inputs, Outputs>::workspace_bytes() const {
  return state().planned.workspace_bytes;
}
template <typename Inputs, typename Outputs>
Explanation Plan<Inputs, Outputs>::explain() const {
  return state().planned.explain();
}
template <typename Inputs, typename Outputs>
void Plan<Inputs, Outputs>::check(const Context& context) const {
  state().planned.check(context);
}
template <typename Inputs, typename Outputs>
void Plan<Inputs, Outputs>::launch(const Context& context) const {
  state().planned.launch(context);
}
template <typename Inputs, typename Outputs>
void Plan<Inputs, Outputs>::run(const Context& context) const {
  check(context);
  launch(context);
}

/// The state of a plan that cannot run on other tensors.
template <typename K>
struct PlanState {
  PlannedCall<K> planned;

  template <typename Checked>
  PlanState(std::span<const K> kernels, std::string_view name, const Context& context, const Checked& checked)
      : planned(kernels, name, context, checked) {}
};

/// Implements the public functions of one pass. `kernels()` returns the operation's list; `checked(inputs,
/// options, results, context)` checks the arguments and returns the call.
template <typename Plan, auto kernels, auto checked>
struct PassOf {
  template <typename I, typename O, typename R>
  static Plan plan(const I& inputs, const O& options, const R& results, const Context& context) {
    return PlanAccess::make<Plan>(kernels(), options.kernel, context,
                                  [&] { return checked(inputs, options, results, context); });
  }
  template <typename I, typename O, typename R>
  static std::size_t workspace(const I& inputs, const O& options, const R& results, const Context& context) {
    return kernel_workspace(kernels(), checked(inputs, options, results, context), options.kernel, context);
  }
  template <typename I, typename O, typename R>
  static Explanation explain(const I& inputs, const O& options, const R& results, const Context& context) {
    return explain_kernels(kernels(), checked(inputs, options, results, context), options.kernel, context);
  }
};

}  // namespace tilewise
