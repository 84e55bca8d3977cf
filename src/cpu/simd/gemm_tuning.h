#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewise::cpu::simd {

// These numbers were found by measurement; docs/lab/layer.md has the figures.

/// K is computed in chunks of this size: a panel of B of this depth stays in the L1.
inline constexpr std::int64_t gemm_k_chunk = 256;
/// The largest tile of out. Its accumulators and the chunk of A and B that it multiplies stay in the L2.
inline constexpr std::int64_t gemm_tile_rows = 240;
inline constexpr std::int64_t gemm_tile_columns = 128;
/// The largest slab: the rows of A that are packed at a time, for all threads, in bytes.
inline constexpr std::int64_t gemm_slab_bytes = std::int64_t{16} << 20;
/// Up to this many rows of A, B is not packed, and is read once, from its own memory.
inline constexpr std::int64_t gemm_max_few_rows = 32;
/// Rows of B, which are columns of out, per task in that case.
inline constexpr std::int64_t gemm_few_rows_columns = 32;
/// The chunk of K that is multiplied with all rows of A before the next chunk, in that case.
inline constexpr std::int64_t gemm_few_rows_k_chunk = 1024;

}  // namespace tilewise::cpu::simd
