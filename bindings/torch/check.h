#pragma once

#include <concepts>
#include <string>
#include <string_view>

#include "tilewise/error.h"
#include "tilewise/tensor.h"

namespace tilewise::torch_binding {

// Checks of arguments that only the operators have, and that the library does not see. Messages have the
// library's form.

/// Throws InvalidArgument("argument: expected …, got …").
[[noreturn]] inline void reject(std::string_view argument, std::string_view expected,
                                std::string_view given) {
  throw InvalidArgument(std::string(argument) + ": expected " + std::string(expected) + ", got " +
                        std::string(given));
}

inline void check(bool holds, std::string_view argument, std::string_view expected, std::string_view given) {
  if (!holds) reject(argument, expected, given);
}
inline void check(bool holds, std::string_view argument, std::string_view expected, const Tensor& given) {
  if (!holds) reject(argument, expected, given.given() ? to_string(given) : "none");
}
inline void check(bool holds, std::string_view argument, std::string_view expected,
                  std::integral auto given) {
  if (!holds) reject(argument, expected, std::to_string(given));
}

}  // namespace tilewise::torch_binding
