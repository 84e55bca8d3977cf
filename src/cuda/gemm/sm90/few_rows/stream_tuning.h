#pragma once

#include <cstdint>
#include <iterator>

namespace tilewise::cuda::gemm {

/// How a block of the kernel for one row is cut.
struct StreamConfig {
  int pieces = 1;  ///< of 16 bytes, that a thread has of a row
  int ahead = 8;   ///< pieces that are under way

  static constexpr int threads = 512;
  static constexpr int warps = threads / 32;
  /// Sums of a row lie apart by one more than there are, so that those of 32 rows lie in all banks.
  static constexpr int pitch = warps + 1;

  /// A power of two, and of a gated product whole pairs.
  constexpr int rows_ahead() const { return ahead / pieces; }
  constexpr int summands() const { return pieces * threads * 8; }

  friend constexpr bool operator==(const StreamConfig&, const StreamConfig&) = default;
};

/// By summands; of the first that suffices.
struct Streams {
  static constexpr StreamConfig rows[] = {
      {.pieces = 1, .ahead = 8},
      {.pieces = 2, .ahead = 8},
      {.pieces = 3, .ahead = 6},
  };
  static constexpr std::int64_t most_summands() { return rows[std::size(rows) - 1].summands(); }
};

}  // namespace tilewise::cuda::gemm
