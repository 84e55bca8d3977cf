#pragma once

#include "core/index_fault.h"
#include "rope/call.h"

namespace tilewise {

/// The rules that the contents of index tensors may break.
enum class RopeRule : std::uint8_t {
  none,
  position,  ///< a position is outside the table of angles
  room,      ///< tokens are outside the cache, by cache_starts or cache_ends
  angles,    ///< the table of angles ends before a token's slot
  page,      ///< a page number is outside the cache
};
using RopeFault = IndexFault<RopeRule>;

/// The index tensors of a call as items that can be checked independently: one for each position, then one
/// for each batch entry's slots in the cache.
class RopeIndices {
 public:
  explicit RopeIndices(const RopeCall& call) : call_(call) {
    if (call.positions.data != nullptr) positions_ = entries_of_positions() * call.problem.length;
    if (call.problem.cache != CacheLayout::none) entries_ = call.problem.batch;
  }

  std::int64_t items() const { return positions_ + entries_; }

  constexpr RopeFault fault(std::int64_t item) const {
    return item < positions_ ? fault_of_position(item) : fault_of_entry(item - positions_);
  }

 private:
  constexpr std::int64_t entries_of_positions() const {
    return call_.positions.stride_b == 0 ? std::min<std::int64_t>(call_.problem.batch, 1)
                                         : call_.problem.batch;
  }

  constexpr RopeFault fault_of_position(std::int64_t item) const {
    const std::int64_t length = call_.problem.length;
    const std::int64_t position = call_.positions.at(item / length, item % length);
    if (position >= 0 && position < call_.angle_rows) return {};
    return {RopeRule::position, false, position};
  }

  constexpr RopeFault fault_of_entry(std::int64_t b) const {
    const std::int64_t start = call_.cache_start(b), end = start + call_.problem.length;
    if (start < 0 || end > call_.capacity) return {RopeRule::room, false, start, {b}};
    if (call_.angles_of_places && call_.problem.rotary_dim > 0 && end > call_.angle_rows) {
      return {RopeRule::angles, false, end};
    }
    if (call_.problem.cache != CacheLayout::paged || start == end) return {};
    for (std::int64_t slot = start / call_.page; slot * call_.page < end; ++slot) {
      const std::int32_t page = call_.page_table.at(b, slot);
      if (page < 0 || page >= call_.pages) return {RopeRule::page, false, page};
    }
    return {};
  }

  RopeCall call_;
  std::int64_t positions_ = 0, entries_ = 0;
};

}  // namespace tilewise
