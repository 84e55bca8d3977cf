#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"

namespace tilewise::cuda {

// Tensors of 16-bit elements for copies of boxes of some rows and 64 columns, swizzled as products want them.
// Past a tensor's bounds, those of its columns too, boxes have zeros.

/// A tensor [B, H, S, D].
CUtensorMap map_of(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t length,
                   std::int64_t dim, int box_rows);

/// A tensor [B, H, S, D] as [B, H / group, S, group, D]: a box has `group` heads of each of its rows.
CUtensorMap map_of_groups(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t group,
                          std::int64_t length, std::int64_t dim, int box_rows);

/// A mask over [B, Hq, Sq, Sk], whose strides are 0 where it is repeated; boxes have `box_rows` queries and
/// `box_keys` keys, or what of them 128 bytes hold.
CUtensorMap map_of_mask(const MaskView& mask, const AttentionProblem& problem, int box_rows, int box_keys);

/// The tiles of a block mask [tiles, block_q, block_k] as [1, tiles, block_q, block_k]; boxes as above, of 64
/// queries.
CUtensorMap map_of_tiles(const BlockView& blocks, int box_keys);

/// A matrix [rows, columns] whose rows lie `stride` elements apart.
CUtensorMap map_of_matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_columns = 64);

/// A matrix whose rows are panels of 64 elements [panels, rows, 64], columns being a multiple of that: a box
/// has `box_panels` panels, each as a box of the map above has it, one behind the other.
CUtensorMap map_of_panels(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_panels);

}  // namespace tilewise::cuda
