#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cuda::wgmma {

/// A row of a mask's tile in global memory: bytes [begin, end), counted from `place`, the start of a 16-byte
/// chunk. An asynchronous copy loads the bytes [from, to), whole chunks that lie inside the mask.
struct OddRow {
  std::uintptr_t place;
  int begin, end, from, to;

  /// The row of `bytes` bytes at `address`, of a mask in [first, last).
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
