#pragma once

#include <atomic>
#include <cstdint>

namespace tilewise::cuda {

/// A number that no other launch has, and that memory nobody wrote, or wrote 0xFF to, does not have by
/// chance.
inline std::uint32_t new_owner() {
  static std::atomic<std::uint32_t> next{0x5C3A19E7u};
  std::uint32_t owner = next.fetch_add(1);
  while (owner == 0 || owner == 0xFFFFFFFFu) owner = next.fetch_add(1);
  return owner;
}

}  // namespace tilewise::cuda
