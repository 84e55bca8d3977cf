#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "tilewise/error.h"
#include "tilewise/tensor.h"

namespace tilewise {

/// Prints a value for a message: a tensor as type and shape, a callable as its result. So a callable is only
/// called when a check fails.
template <typename T>
void describe(std::ostream& out, const T& value) {
  if constexpr (std::is_invocable_v<T>) {
    out << value();
  } else if constexpr (std::is_same_v<T, Tensor>) {
    out << (value.given() ? to_string(value) : "none");
  } else {
    out << value;
  }
}

/// Throws InvalidArgument("argument: expected …, got …").
template <typename Expected, typename Given>
[[noreturn]] void reject(std::string_view argument, const Expected& expected, const Given& given) {
  std::ostringstream text;
  text << argument << ": expected ";
  describe(text, expected);
  text << ", got ";
  describe(text, given);
  throw InvalidArgument(text.str());
}

template <typename Expected, typename Given>
void check(bool holds, std::string_view argument, const Expected& expected, const Given& given) {
  if (!holds) reject(argument, expected, given);
}

}  // namespace tilewise
