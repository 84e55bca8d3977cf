#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/panel.h"

namespace tilewise::cpu::simd {

// These numbers were found by measurement; docs/lab/cpu.md has the figures.

/// The width of a panel in vectors. Three leave registers for 8 rows of accumulators (of 32 registers) or 4
/// (of 16).
inline constexpr int panel_vectors = 3;

/// Keys per tile: the tile of S and its rows of K and V should stay in the L2.
constexpr int tile_keys(std::int64_t dim) {
  if (dim <= 128) return 128;
  if (dim <= 512) return 64;
  return dim <= 1024 ? 32 : 16;
}

/// The width of the panels: as few panels as possible, all about equally wide.
constexpr int panel_width(std::int64_t queries, int lanes) {
  const std::int64_t widest = panel_vectors * lanes;
  const std::int64_t panels = std::max<std::int64_t>(1, (queries + widest - 1) / widest);
  const std::int64_t width = (queries + panels - 1) / panels;
  return static_cast<int>(std::max<std::int64_t>(1, (width + lanes - 1) / lanes) * lanes);
}

/// Below this many tasks forward splits the keys (split-KV), so that there is work for several threads. This
/// depends on the problem alone and never on the number of threads, on which results must not depend.
inline constexpr std::int64_t enough_tasks = 32;
inline constexpr std::int64_t min_keys_per_split = 512;

constexpr std::int64_t key_splits(std::int64_t tasks, std::int64_t keys) {
  if (tasks == 0 || tasks >= enough_tasks) return 1;
  return std::clamp<std::int64_t>(keys / min_keys_per_split, 1, (enough_tasks + tasks - 1) / tasks);
}

/// The number of splits in which backward sums dK and dV of a key head, for the same reason.
constexpr std::int64_t gradient_splits(std::int64_t kv_heads, std::int64_t panels) {
  constexpr std::int64_t enough = 16;
  constexpr std::int64_t most = 8;  // each split has its own dK and dV in memory
  if (kv_heads == 0 || panels == 0) return 1;
  return std::clamp<std::int64_t>((enough + kv_heads - 1) / kv_heads, 1, std::min(most, panels));
}

}  // namespace tilewise::cpu::simd
