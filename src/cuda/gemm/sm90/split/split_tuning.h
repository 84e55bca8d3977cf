#pragma once

#include "cuda/gemm/sm90/tiles/tuning.h"

namespace tilewise::cuda::gemm {

/// How a block that multiplies split factors is cut: a warp that loads, and two warpgroups that have 64 rows
/// each of a tile.
struct SplitConfig {
  int parts = 2;  ///< of f16; of bf16 it is one more
  int columns = 128;
  int stages = 3;  ///< each of 64 summands, all parts of f16 of a and b
  int piece = 1;   ///< stages whose sums tensor cores make
  bool gated = false;

  static constexpr int depth = GemmConfig::depth;

  constexpr int terms() const { return parts == 2 ? 3 : 1; }       ///< products of parts of f16
  constexpr int bf16_terms() const { return parts == 2 ? 6 : 3; }  ///< of bf16
  constexpr int rows() const { return 128; }
  constexpr int a_bytes() const { return rows() * depth * 2; }  ///< of one part
  constexpr int b_bytes() const { return columns * depth * 2; }
  constexpr int stage_bytes() const { return parts * (a_bytes() + b_bytes()); }
  /// What becomes of sums is what the kernel for 16 bits does with those of results in f32.
  constexpr GemmConfig output() const {
    return {.columns = columns, .stages = stages, .gated = gated, .wide = true};
  }
  constexpr int slabs_bytes() const { return output().slabs_bytes(); }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(stages * stage_bytes() + slabs_bytes() + output().barrier_bytes());
  }
  friend constexpr bool operator==(const SplitConfig&, const SplitConfig&) = default;
};

template <bool tf32, bool gated>
struct Split;
template <bool gated>
struct Split<false, gated> {
  static constexpr SplitConfig rows[] = {{.parts = 2, .stages = 3, .piece = 1, .gated = gated}};
};
template <bool gated>
struct Split<true, gated> {
  static constexpr SplitConfig rows[] = {{.parts = 1, .stages = 6, .piece = 8, .gated = gated}};
};

}  // namespace tilewise::cuda::gemm
