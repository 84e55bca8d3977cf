#pragma once

#include "core/rows.h"
#include "rope/problem.h"

namespace tilewise {

/// i32 or i64 [B, S], broadcast through zero strides.
struct Positions {
  const void* data = nullptr;  ///< null if there are none
  bool wide = false;           ///< i64
  std::int64_t stride_b = 0;
  std::int64_t stride_s = 0;

  constexpr std::int64_t at(std::int64_t b, std::int64_t s) const {
    const std::int64_t index = b * stride_b + s * stride_s;
    return wide ? static_cast<const std::int64_t*>(data)[index]
                : static_cast<const std::int32_t*>(data)[index];
  }
};

/// Cosines or sines, [positions, R/2] or [B, S, R/2]; rows are contiguous.
struct Angles {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_b = 0;  ///< 0 for a table [positions, R/2]
  std::int64_t stride_row = 0;

  constexpr std::byte* at(std::int64_t b, std::int64_t row) const {
    return data + (b * stride_b + row * stride_row) * static_cast<std::int64_t>(size_of(dtype));
  }
};

/// A token's slot in a cache.
struct CacheSlot {
  std::int64_t b = 0;   ///< the batch entry or, in a paged cache, the page
  std::int64_t s = 0;   ///< the row there
  bool inside = false;  ///< false: the cache has no such slot, and nothing is written
};

/// A checked call: the problem, and every argument in the form kernels read.
struct RopeCall {
  RopeProblem problem;
  Rows q, k, v;           ///< `wanted` says whether they were given
  Rows out_q, out_k;      ///< the same as q and k if the call is in place
  Rows k_cache, v_cache;  ///< paged: stride_b is the stride of a page
  Angles cos, sin;
  Positions positions;
  Indices cache_starts;           ///< the call's cache_starts or cache_ends; data is null without either
  bool starts_are_ends = false;   ///< cache_starts has ends: the slot behind an entry's last token
  bool angles_of_places = false;  ///< a token's row of the table of angles is the number of its slot
  Indices page_table;
  std::int64_t page = 0;        ///< tokens of a page
  std::int64_t pages = 0;       ///< of each cache
  std::int64_t capacity = 0;    ///< tokens that the cache has room for in each batch entry
  std::int64_t angle_rows = 0;  ///< of the table of angles

  /// The slot of entry b's first token.
  constexpr std::int64_t cache_start(std::int64_t b) const {
    if (cache_starts.data == nullptr) return 0;
    return cache_starts.at(b) - (starts_are_ends ? problem.length : 0);
  }
  /// The row of the table for token s of entry b, clamped to the table: a wrong index tensor never leads
  /// outside.
  constexpr std::int64_t angle_row(std::int64_t b, std::int64_t s) const {
    if (positions.data == nullptr && !angles_of_places) return s;
    const std::int64_t row = positions.data != nullptr ? positions.at(b, s) : cache_start(b) + s;
    return std::max<std::int64_t>(0, std::min(row, angle_rows - 1));
  }
  /// The slot of token s of entry b.
  constexpr CacheSlot cache_slot(std::int64_t b, std::int64_t s) const {
    const std::int64_t slot = cache_start(b) + s;
    if (slot < 0 || slot >= capacity) return {};
    if (problem.cache != CacheLayout::paged) return {b, slot, true};
    const std::int64_t own = page_table.at(b, slot / page);
    return {own, slot % page, own >= 0 && own < pages};
  }
  /// The row of a cache that token s of entry b is written to; null if there is no such slot.
  constexpr std::byte* cache_row(const Rows& cache, std::int64_t b, std::int64_t h, std::int64_t s) const {
    const CacheSlot slot = cache_slot(b, s);
    return slot.inside ? cache.at(slot.b, h, slot.s) : nullptr;
  }
};

}  // namespace tilewise
