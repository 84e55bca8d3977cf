#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// How a product with few rows stands to the kernel ahead of it in the stream, which may still be at work.
/// One that is first has weights come to the L2 meanwhile, which is safe whoever writes them, and reads them
/// once all before it have ended; only then does it let the kernel behind begin. So that one, where it is a
/// second product and the first writes none of its weights, reads them at once.
enum class FewTurn { first, second };

/// Shared memory of a block of each, so that one of the first and one of the second fit on a multiprocessor
/// together, but no two of the first: a block that begins while the kernel ahead is at work would otherwise
/// come to stand beside another of its own, and a multiprocessor would have none.
inline constexpr std::size_t first_bytes = 116 * 1024;
inline constexpr std::size_t second_bytes = 108 * 1024;

/// Of a second product that begins late, when blocks of the first may have ended: so much that no two stand
/// on one multiprocessor, while one of the first's, of 115,424 bytes at the most, has room beside it.
inline constexpr std::size_t late_bytes = 116000;

}  // namespace tilewise::cuda::gemm
