#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// How a block of the kernel for few rows is cut: two warpgroups that multiply, 64 rows of weights each, and
/// a warp that loads. Half a multiprocessor's shared memory at most, so that the next kernel's blocks can
/// begin to load beside it.
struct FewConfig {
  int tokens = 8;      ///< rows of a are filled up to it
  int stages = 6;      ///< tiles of weights in shared memory, each of 64 summands
  bool gated = false;  ///< one warpgroup has the gate's weights, the other those that it gates

  static constexpr int depth = 64;
  static constexpr int consumers = 2;
  static constexpr int threads = consumers * 128 + 32;

  /// Columns of the result.
  constexpr int columns() const { return gated ? 64 : 128; }
  constexpr int weight_bytes() const { return 128 * depth * 2; }
  constexpr int token_bytes() const { return tokens * depth * 2; }
  constexpr int tile_bytes() const { return stages * (weight_bytes() + token_bytes()); }
  /// The result on its way out, 16 tokens of 64 columns a warpgroup, in f32.
  constexpr int staged_tokens() const { return tokens < 16 ? tokens : 16; }
  static constexpr int staged_pitch = 68;
  constexpr int staged_bytes() const { return consumers * staged_tokens() * staged_pitch * 4; }
  /// What is gated, on its way to the gate.
  constexpr int exchanged_bytes() const { return gated ? 64 * tokens * 4 : 0; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + staged_bytes() + exchanged_bytes() + 16 * stages);
  }
  /// Sums of a block's that another finishes.
  constexpr int partial_floats() const { return 128 * tokens; }

  friend constexpr bool operator==(const FewConfig&, const FewConfig&) = default;
};

/// By tokens; of the first that suffices.
struct Few {
  static constexpr FewConfig rows[] = {
      {.tokens = 8, .stages = 6},
      {.tokens = 16, .stages = 5},
      {.tokens = 32, .stages = 5},
      {.tokens = 64, .stages = 4},
  };
};
struct FewGated {
  static constexpr FewConfig rows[] = {
      {.tokens = 8, .stages = 6, .gated = true},
      {.tokens = 16, .stages = 5, .gated = true},
      {.tokens = 32, .stages = 4, .gated = true},
      {.tokens = 64, .stages = 3, .gated = true},
  };
};

/// The most rows that it is for.
inline constexpr int most_tokens = 64;

}  // namespace tilewise::cuda::gemm
