#pragma once

#include <string_view>

namespace tilewise {

inline constexpr std::string_view version = "0.1.0";

}  // namespace tilewise
