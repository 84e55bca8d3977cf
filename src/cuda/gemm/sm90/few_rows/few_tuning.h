#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// The shape of a CTA of few_kernel: two consumer warpgroups of 64 rows of weights each, and a producer warp.
/// It takes at most half of an SM's shared memory, so that CTAs of the next kernel can begin to load beside
/// it.
struct FewConfig {
  int tokens = 8;      ///< the rows of A are padded to it
  int stages = 6;      ///< of weights and tokens in shared memory, each with `depth` of K
  bool gated = false;  ///< consumer 0 has the gate's weights, consumer 1 those that it gates

  static constexpr int depth = 64;
  static constexpr int consumers = 2;
  static constexpr int threads = consumers * 128 + 32;

  /// Columns of the result in a tile.
  constexpr int columns() const { return gated ? 64 : 128; }
  constexpr int weight_bytes() const { return 128 * depth * 2; }
  constexpr int token_bytes() const { return tokens * depth * 2; }
  constexpr int tile_bytes() const { return stages * (weight_bytes() + token_bytes()); }
  /// Results are transposed here on their way out: up to 16 tokens by 64 columns of each consumer, in f32.
  constexpr int staged_tokens() const { return tokens < 16 ? tokens : 16; }
  static constexpr int staged_pitch = 68;
  constexpr int staged_bytes() const { return consumers * staged_tokens() * staged_pitch * 4; }
  /// Consumer 1's values on their way to consumer 0, which multiplies them by the gate.
  constexpr int exchanged_bytes() const { return gated ? 64 * tokens * 4 : 0; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(tile_bytes() + staged_bytes() + exchanged_bytes() + 16 * stages);
  }
  /// Accumulators of a tile that another CTA finishes.
  constexpr int partial_floats() const { return 128 * tokens; }

  friend constexpr bool operator==(const FewConfig&, const FewConfig&) = default;
};

/// The first row with enough tokens runs a problem.
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

/// The most rows of A that few_rows takes.
inline constexpr int most_tokens = 64;

}  // namespace tilewise::cuda::gemm
