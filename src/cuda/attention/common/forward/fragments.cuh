#pragma once

#include "cuda/attention/common/accumulator.cuh"

namespace tilewise::cuda::mma {

// Scores and results as mma.sync holds them. A lane has two rows, g and g + 8, of each row tile, and two
// columns 8n + 2t and 8n + 2t + 1 of each; four neighbouring lanes share a row.

/// Scores of a lane, by row tile, eight keys, and place in the fragment; and o in the same form.
template <auto c>
using Scores = float[c.row_tiles][c.keys / 8][4];
template <auto c>
using Output = float[c.row_tiles][c.dim / 8][4];

}  // namespace tilewise::cuda::mma
