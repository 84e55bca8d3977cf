#pragma once

#include <cstdint>

namespace tilewise {

enum class Pass : std::uint8_t { forward, backward };

}  // namespace tilewise
