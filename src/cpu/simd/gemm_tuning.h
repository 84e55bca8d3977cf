#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cpu::simd {

// Numbers found by measurement; docs/layer.md has the figures.

/// Columns of b (tokens or features summed over) that are multiplied at a time: a panel of b of that depth
/// stays in the L1, a block of a in the L2.
inline constexpr std::int64_t gemm_depth = 192;
/// Rows and columns of a tile of out, about; its sums stay in the L2.
inline constexpr std::int64_t gemm_tile_rows = 144;
inline constexpr std::int64_t gemm_tile_columns = 384;
/// Bytes of b that are packed before they are multiplied: shared by all threads, in the last cache.
inline constexpr std::int64_t gemm_slab_bytes = std::int64_t{16} << 20;
/// Up to this many rows of a, b is not packed but read once, where it lies.
inline constexpr std::int64_t gemm_few_rows = 32;
/// Rows of b a task takes then.
inline constexpr std::int64_t gemm_few_columns = 32;
/// Columns of b that meet all rows of a before the next.
inline constexpr std::int64_t gemm_few_depth = 1024;

}  // namespace tilewise::cpu::simd
