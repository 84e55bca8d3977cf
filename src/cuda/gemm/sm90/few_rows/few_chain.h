#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// How a product with few rows stands to the kernel ahead of it in the stream, which may still be at work.
/// One that is first has weights come to the L2 meanwhile, which is safe whoever writes them, and reads them
/// once all before it have ended; only then does it let the kernel behind begin. So that one, where it is a
/// second product and the first writes none of its weights, reads them at once.
enum class InChain { first, second };

/// Shared memory of a block of each, so that one of the first and one of the second fit on a multiprocessor
/// together, but no two of the first: a block that begins while the kernel ahead is at work would otherwise
/// come to stand beside another of its own, and a multiprocessor would have none.
inline constexpr std::size_t first_bytes = 116 * 1024;
inline constexpr std::size_t second_bytes = 108 * 1024;

/// The same of a second product behind one by tiles, which begins late, when blocks of the first may have
/// ended: so much that no two of its own fit, while one of the first's has room beside it that has no more
/// than the latter. With each block go 1 KiB of the system's, of 228 in all.
inline constexpr std::size_t late_bytes = 116000;
inline constexpr std::size_t beside_late_bytes = 228 * 1024 - 2 * 1024 - late_bytes;

}  // namespace tilewise::cuda::gemm
