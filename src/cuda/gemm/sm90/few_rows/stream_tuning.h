#pragma once

#include <cstdint>
#include <iterator>

namespace tilewise::cuda::gemm {

/// The shape of a CTA of stream_kernel.
struct StreamConfig {
  int chunks = 1;           ///< chunks of 16 bytes that a thread has of each row of weights
  int loads_in_flight = 8;  ///< chunks that a thread has requested and not used yet

  static constexpr int threads = 512;
  static constexpr int warps = threads / 32;
  /// Floats from the warps' sums of one row to those of the next. They are one more than there are warps, so
  /// that the sums of 32 rows are in different banks.
  static constexpr int pitch = warps + 1;

  /// A power of two; even, so that with a gate they are whole pairs.
  constexpr int rows_in_flight() const { return loads_in_flight / chunks; }
  /// The largest K that the threads cover.
  constexpr int most_k() const { return chunks * threads * 8; }

  friend constexpr bool operator==(const StreamConfig&, const StreamConfig&) = default;
};

/// The first row that covers K runs a problem.
struct Streams {
  static constexpr StreamConfig rows[] = {
      {.chunks = 1, .loads_in_flight = 8},
      {.chunks = 2, .loads_in_flight = 8},
      {.chunks = 3, .loads_in_flight = 6},
  };
  static constexpr std::int64_t most_k() { return rows[std::size(rows) - 1].most_k(); }
};

}  // namespace tilewise::cuda::gemm
