#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cpu::simd {

// Numbers found by measurement; docs/layer.md has the figures.

/// How much of K is multiplied at a time: a panel of b of that depth stays in the L1.
inline constexpr std::int64_t gemm_depth = 256;
/// Rows and columns of a tile of out, at most; its sums and what of a and b it needs at a time stay in the
/// L2.
inline constexpr std::int64_t gemm_tile_rows = 240;
inline constexpr std::int64_t gemm_tile_columns = 128;
/// Bytes of a that are packed before they are multiplied, at most: shared by all threads.
inline constexpr std::int64_t gemm_slab_bytes = std::int64_t{16} << 20;
/// Up to this many rows of a, b is not packed but read once, where it lies.
inline constexpr std::int64_t gemm_few_rows = 32;
/// Rows of b a task takes then.
inline constexpr std::int64_t gemm_few_columns = 32;
/// Columns of b that meet all rows of a before the next.
inline constexpr std::int64_t gemm_few_depth = 1024;

}  // namespace tilewise::cpu::simd
