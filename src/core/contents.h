#pragma once

#include <cstdint>

namespace tilewise {

/// Whether checks of a call look at what index tensors on the CPU hold, or leave that to check_indices() when
/// the call runs.
enum class Contents : std::uint8_t { checked, unread };

}  // namespace tilewise
