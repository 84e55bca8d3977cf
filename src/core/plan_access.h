#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

#include "tilewise/plan.h"

namespace tilewise {

/// Gives the library access to the private members of a plan.
struct PlanAccess {
  /// Makes a plan whose state is constructed from these arguments.
  template <typename P, typename... Arguments>
  static P make(const Arguments&... arguments) {
    using S = typename P::State;
    static_assert(sizeof(S) <= P::state_bytes && alignof(S) <= alignof(std::max_align_t));
    static_assert(std::is_trivially_copyable_v<S> && std::is_trivially_destructible_v<S>);
    P plan;
    new (plan.state_) S(arguments...);
    return plan;
  }
  /// The two steps of P::run.
  template <typename P>
  static void check(const P& plan, const Context& context) {
    plan.check(context);
  }
  template <typename P>
  static void launch(const P& plan, const Context& context) {
    plan.launch(context);
  }
};

}  // namespace tilewise
