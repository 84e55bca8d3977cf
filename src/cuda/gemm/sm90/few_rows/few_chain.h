#pragma once

#include <cstddef>

namespace tilewise::cuda::gemm {

/// A GEMM with few rows may be the second of a chain: the kernel before it in the stream is then another one
/// with few rows, such as in a feed-forward network. Kernels may start before the previous one has ended
/// (PDL).
///
/// - first: any kernel may come before, and may write the weights. A GEMM that starts early only prefetches
///   weights into the L2, which is safe then. It loads them when the previous kernel has ended, and only
///   after that does it allow the next kernel to start.
/// - second: the first GEMM of the chain writes none of this one's weights, and what came before the first
///   has ended. So weights are loaded at once, while the first GEMM is still at work.
enum class InChain { first, second };

/// Shared memory of a CTA of the first and of the second GEMM of a chain. It is chosen such that a CTA of
/// each fits on an SM together, but no two CTAs of the first. Otherwise a CTA that starts while the previous
/// kernel is at work could come to an SM that already has one of the same GEMM, and another SM would have
/// none.
inline constexpr std::size_t shared_of_first = 116 * 1024;
inline constexpr std::size_t shared_of_second = 108 * 1024;

/// The same where the first GEMM runs by tiles (few_tile.cuh). The second then starts late, when CTAs of the
/// first may have ended. It asks for so much that no two of its own CTAs fit on an SM, while a CTA of the
/// first fits beside it that takes at most shared_beside_late_second. An SM has 228 KiB, of which the system
/// takes 1 KiB for each CTA.
inline constexpr std::size_t shared_of_late_second = 116000;
inline constexpr std::size_t shared_beside_late_second = 228 * 1024 - 2 * 1024 - shared_of_late_second;

}  // namespace tilewise::cuda::gemm
