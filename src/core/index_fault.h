#pragma once

#include <cstdint>

namespace tilewise {

// The rules for what index tensors hold are written once and run on both sides: a CPU call walks over all
// items of its tensors before anything else; on a device a kernel does, where asked (core/debug.h). An item
// is a part that is checked by itself. The first item with a fault is the one that is reported, by the same
// words on either side.

/// A number that breaks a rule; what the places mean is the rule's matter.
template <typename Rule>
struct IndexFault {
  Rule rule = Rule::none;
  bool second = false;  ///< of two tensors that have the same rule
  std::int64_t value = 0;
  std::int64_t place[3] = {};

  constexpr bool found() const { return rule != Rule::none; }
};

}  // namespace tilewise
