#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"

namespace tilewise::cuda {

// Tensor maps for TMA. Elements have 16 bits, except in masks. A box has some rows and 64 columns, swizzled
// as wgmma reads them. Boxes have zeros past the tensor's bounds, also past its columns.

/// A tensor [B, H, S, D].
CUtensorMap map_of(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t length,
                   std::int64_t dim, int box_rows);

/// A tensor [B, H, S, D] as [B, H / group, S, group, D]: a box has `group` heads of each of its rows.
CUtensorMap map_of_groups(const Rows& rows, std::int64_t batch, std::int64_t heads, std::int64_t group,
                          std::int64_t length, std::int64_t dim, int box_rows);

/// A mask [B, Hq, Sq, Sk], whose strides are 0 where it is broadcast. Boxes have `box_rows` queries and
/// `box_keys` keys, or as many as 128 bytes hold.
CUtensorMap map_of_mask(const MaskView& mask, const AttentionProblem& problem, int box_rows, int box_keys);

/// The tiles of a block mask [tiles, block_q, block_k] as [1, tiles, block_q, block_k]; boxes are as above,
/// with 64 queries.
CUtensorMap map_of_tiles(const BlockView& blocks, int box_keys);

/// A matrix [rows, columns] with a row stride of `stride` elements.
CUtensorMap map_of_matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_columns = 64);

/// A matrix as panels of 64 columns, [panels, rows, 64]; `columns` is a multiple of 64. A box has
/// `box_panels` panels, one after another, each like a box of map_of_matrix().
CUtensorMap map_of_panels(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride, int box_rows, int box_panels);

}  // namespace tilewise::cuda
