#pragma once

#include <cstdint>

namespace tilewise {

/// Whether planning checks the contents of index tensors on the CPU, or leaves that to check_indices() when
/// the call runs.
enum class Contents : std::uint8_t { checked, unread };

}  // namespace tilewise
