#pragma once

#include <cstdint>
#include <string_view>

namespace tilewise {

/// The function that is applied to the elements of a product. gelu is the exact form with erf, gelu_tanh its
/// approximation with tanh.
enum class Activation : std::uint8_t { none, relu, gelu, gelu_tanh, silu };

constexpr std::string_view to_string(Activation activation) {
  switch (activation) {
    case Activation::none: return "none";
    case Activation::relu: return "relu";
    case Activation::gelu: return "gelu";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::silu: return "silu";
  }
  return "unknown";
}

}  // namespace tilewise
