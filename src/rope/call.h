#pragma once

#include "core/rows.h"
#include "rope/problem.h"

namespace tilewise {

/// i32 or i64 [B, S], broadcast through zero strides.
struct Positions {
  const void* data = nullptr;  ///< null where there are none
  bool wide = false;           ///< i64
  std::int64_t stride_b = 0;
  std::int64_t stride_s = 0;

  constexpr std::int64_t at(std::int64_t b, std::int64_t s) const {
    const std::int64_t index = b * stride_b + s * stride_s;
    return wide ? static_cast<const std::int64_t*>(data)[index]
                : static_cast<const std::int32_t*>(data)[index];
  }
};

/// cos or sin; rows are contiguous.
struct Angles {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_b = 0;  ///< 0 in a table
  std::int64_t stride_row = 0;

  constexpr std::byte* at(std::int64_t b, std::int64_t row) const {
    return data + (b * stride_b + row * stride_row) * static_cast<std::int64_t>(size_of(dtype));
  }
};

/// A place in a cache: the entry or, where it is paged, the page, and the row there.
struct CacheSlot {
  std::int64_t b = 0;
  std::int64_t s = 0;
  bool inside = false;  ///< else the cache has no such place, and nothing is written
};

/// A checked call: the problem, and every argument in the form kernels read.
struct RopeCall {
  RopeProblem problem;
  Rows q, k, v;           ///< `wanted` says whether they were given
  Rows out_q, out_k;      ///< in place they are q and k
  Rows k_cache, v_cache;  ///< paged: the stride of a page in stride_b
  Angles cos, sin;
  Positions positions;
  Indices cache_starts;           ///< or ends; data is null where there are none
  bool starts_are_ends = false;   ///< the tokens are the last of their places
  bool angles_of_places = false;  ///< token s of a table is that of its place in the cache
  Indices page_table;
  std::int64_t page = 0;        ///< tokens a page
  std::int64_t pages = 0;       ///< of the caches
  std::int64_t capacity = 0;    ///< tokens an entry has room for in the cache
  std::int64_t angle_rows = 0;  ///< of a table

  /// The place of entry b's first token in the cache.
  constexpr std::int64_t cache_start(std::int64_t b) const {
    if (cache_starts.data == nullptr) return 0;
    return cache_starts.at(b) - (starts_are_ends ? problem.length : 0);
  }
  /// The row of the tables for token s of entry b: one of those there are, whatever the numbers are.
  constexpr std::int64_t angle_row(std::int64_t b, std::int64_t s) const {
    if (positions.data == nullptr && !angles_of_places) return s;
    const std::int64_t row = positions.data != nullptr ? positions.at(b, s) : cache_start(b) + s;
    return std::max<std::int64_t>(0, std::min(row, angle_rows - 1));
  }
  /// Where token s of entry b goes in the cache.
  constexpr CacheSlot cache_slot(std::int64_t b, std::int64_t s) const {
    const std::int64_t slot = cache_start(b) + s;
    if (slot < 0 || slot >= capacity) return {};
    if (problem.cache != CacheLayout::paged) return {b, slot, true};
    const std::int64_t own = page_table.at(b, slot / page);
    return {own, slot % page, own >= 0 && own < pages};
  }
  /// Null where it goes nowhere.
  constexpr std::byte* cache_row(const Rows& cache, std::int64_t b, std::int64_t h, std::int64_t s) const {
    const CacheSlot slot = cache_slot(b, s);
    return slot.inside ? cache.at(slot.b, h, slot.s) : nullptr;
  }
};

}  // namespace tilewise
