#pragma once

#include "support/buffer.h"

namespace tilewise::test {

/// What a tensor's strides may be.
struct PlacementRules {
  unsigned expandable;   ///< bits of dimensions that may have stride 0
  bool flip;             ///< negative strides
  bool contiguous_rows;  ///< the last dimension has stride 1
  int grain = 1;         ///< elements that rows begin at multiples of
};
/// Rows of q, k and the like.
constexpr PlacementRules input_rows(unsigned expandable) { return {expandable, true, true}; }
constexpr PlacementRules aligned_rows(unsigned expandable) { return {expandable, false, true, 8}; }
inline constexpr PlacementRules output_rows = {.expandable = 0, .flip = true, .contiguous_rows = true};
inline constexpr PlacementRules input_values = {.expandable = ~0u, .flip = true, .contiguous_rows = false};
inline constexpr PlacementRules output_values = {.expandable = 0, .flip = true, .contiguous_rows = false};
/// Inputs whose elements must stay apart.
inline constexpr PlacementRules input_indices = {.expandable = 0, .flip = true, .contiguous_rows = false};

Placement random_placement(Random& rng, const Shape& shape, const PlacementRules& rules);

inline Buffer random_buffer(Random& rng, DType dtype, const Shape& shape, const PlacementRules& rules) {
  return Buffer(dtype, shape, random_placement(rng, shape, rules));
}

}  // namespace tilewise::test
