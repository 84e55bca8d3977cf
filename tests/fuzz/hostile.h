#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fuzz/call.h"

namespace tilewise::fuzz {

/// Bytes of a mistake: what is wrong, with which argument, where and how.
inline constexpr std::size_t mistake_bytes = 5;

/// Makes something wrong, or at least odd, with the call before it has memory: see take_contents().
void make_mistake(Call& call, const std::array<std::uint8_t, mistake_bytes>& bytes);

}  // namespace tilewise::fuzz
