#pragma once

#include <cstdint>

namespace tilewise {

// The rules for the contents of index tensors are written once, for host and device. A call divides its index
// tensors into items, which are checked independently. On the CPU it checks all items before anything else;
// on a device a kernel does so where the caller asked for it (core/debug.h). The first item with a fault is
// reported, with the same message on both sides.

/// A number that breaks a rule. The meaning of `place` depends on the rule.
template <typename Rule>
struct IndexFault {
  Rule rule = Rule::none;
  bool second = false;  ///< which of two tensors with the same rule
  std::int64_t value = 0;
  std::int64_t place[3] = {};

  constexpr bool found() const { return rule != Rule::none; }
};

}  // namespace tilewise
