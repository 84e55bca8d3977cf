#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/panel.h"

namespace tilewise::cpu::simd {

// Numbers found by measurement; docs/cpu.md has the figures.

/// Vectors a panel is wide. Three leave room for 8 (32 registers) or 4 (16 registers) rows of accumulators.
inline constexpr int panel_vectors = 3;

/// Keys computed together: the tile of scores and the rows of K and V it needs should stay in the L2.
constexpr int tile_keys(std::int64_t dim) {
  if (dim <= 128) return 128;
  if (dim <= 512) return 64;
  return dim <= 1024 ? 32 : 16;
}

/// Queries a panel: as few panels as the widest allows, then all about equally wide.
constexpr int panel_width(std::int64_t queries, int lanes) {
  const std::int64_t widest = panel_vectors * lanes;
  const std::int64_t panels = std::max<std::int64_t>(1, (queries + widest - 1) / widest);
  const std::int64_t width = (queries + panels - 1) / panels;
  return static_cast<int>(std::max<std::int64_t>(1, (width + lanes - 1) / lanes) * lanes);
}

/// Below this many tasks forward splits the keys, so that several threads find work. Problem alone decides,
/// never the number of threads: the result must not depend on it.
inline constexpr std::int64_t enough_tasks = 32;
inline constexpr std::int64_t min_keys_per_split = 512;

constexpr std::int64_t key_splits(std::int64_t tasks, std::int64_t keys) {
  if (tasks == 0 || tasks >= enough_tasks) return 1;
  return std::clamp<std::int64_t>(keys / min_keys_per_split, 1, (enough_tasks + tasks - 1) / tasks);
}

/// Backward sums dk and dv of a key head in this many parts, for the same reason.
constexpr std::int64_t gradient_splits(std::int64_t kv_heads, std::int64_t panels) {
  constexpr std::int64_t enough = 16;
  constexpr std::int64_t most = 8;  // each part takes memory of its own
  if (kv_heads == 0 || panels == 0) return 1;
  return std::clamp<std::int64_t>((enough + kv_heads - 1) / kv_heads, 1, std::min(most, panels));
}

}  // namespace tilewise::cpu::simd
