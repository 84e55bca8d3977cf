#pragma once

#include <atomic>
#include <cstdint>

namespace tilewise::cuda {

/// A number that no other launch has, and that memory which is uninitialised, or filled with 0 or 0xFF, is
/// unlikely to hold.
inline std::uint32_t new_owner() {
  static std::atomic<std::uint32_t> next{0x5C3A19E7u};
  std::uint32_t owner = next.fetch_add(1);
  while (owner == 0 || owner == 0xFFFFFFFFu) owner = next.fetch_add(1);
  return owner;
}

}  // namespace tilewise::cuda
