#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// A row of a mask's tile: bytes [begin, end) from the chunk of 16 bytes at `place` on, which is an address
/// in global memory. Of these, an asynchronous copy brings the chunks [from, to), none of which reaches
/// outside the mask.
struct OddRow {
  std::uintptr_t place;
  int begin, end, from, to;

  /// Of a row of so many bytes at `address`, where the mask lies in [first, last).
  constexpr OddRow(std::uintptr_t first, std::uintptr_t last, std::uintptr_t address, int bytes)
      : place(address / 16 * 16),
        begin(static_cast<int>(address % 16)),
        end(begin + bytes),
        from(place < first ? 16 : 0),
        to((end + 15) / 16 * 16) {
    if (place + static_cast<std::uintptr_t>(to) > last) to -= 16;
    to = std::max(from, to);
  }
};

}  // namespace tilewise::cuda::wgmma
