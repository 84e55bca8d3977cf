#pragma once

#include "support/buffer.h"

namespace tilewise::test {

/// The strides that a tensor may have.
struct PlacementRules {
  unsigned expandable;   ///< bit n: dimension n may have stride 0
  bool flip;             ///< strides may be negative
  bool contiguous_rows;  ///< the last dimension has stride 1
  int grain = 1;         ///< rows begin at multiples of this many elements
};
/// For q, k, v and d_o.
constexpr PlacementRules input_rows(unsigned expandable) { return {expandable, true, true}; }
constexpr PlacementRules aligned_rows(unsigned expandable) { return {expandable, false, true, 8}; }
inline constexpr PlacementRules output_rows = {.expandable = 0, .flip = true, .contiguous_rows = true};
inline constexpr PlacementRules input_values = {.expandable = ~0u, .flip = true, .contiguous_rows = false};
inline constexpr PlacementRules output_values = {.expandable = 0, .flip = true, .contiguous_rows = false};
/// For inputs whose elements must not share memory.
inline constexpr PlacementRules input_indices = {.expandable = 0, .flip = true, .contiguous_rows = false};

Placement random_placement(Random& rng, const Shape& shape, const PlacementRules& rules);

inline Buffer random_buffer(Random& rng, DType dtype, const Shape& shape, const PlacementRules& rules) {
  return Buffer(dtype, shape, random_placement(rng, shape, rules));
}

}  // namespace tilewise::test
