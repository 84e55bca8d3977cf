#pragma once

#include <span>
#include <string_view>

#include "attention/call.h"
#include "core/kernel_list.h"

namespace tilewise {

/// An implementation of attention in both passes; `call.problem.pass` says which one to compute.
using AttentionKernel = Kernel<AttentionProblem, AttentionCall>;

/// All attention kernels, fastest first, the plain reference last. The choice walks this list.
std::span<const AttentionKernel> attention_kernel_list();

/// The kernel of that name or, for "auto", the first that can compute the problem and does not yield. Throws
/// Unsupported, with the reasons, if there is none.
const AttentionKernel& choose_attention_kernel(const AttentionProblem& problem, std::string_view name);

/// Checks the contents of index tensors and throws InvalidArgument if they are wrong. On a CUDA device this
/// happens only where the caller asked for it: a kernel checks them, and the call waits for the stream.
void check_indices(const AttentionCall& call, const Context& context);

/// The call with dropout's seed and offset read from memory, if they are there. CPU kernels call it when they
/// start.
inline AttentionCall with_drawn_dropout(const AttentionCall& call) {
  AttentionCall drawn = call;
  drawn.dropout = call.dropout.drawn();
  return drawn;
}

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const AttentionKernel wgmma_attention;
extern const AttentionKernel wgmma_halves_attention;
extern const AttentionKernel mma_attention;
extern const AttentionKernel widened_attention;
extern const AttentionKernel wide_batched_attention;
extern const AttentionKernel wide_attention;
extern const AttentionKernel fused_attention;
extern const AttentionKernel tiled_attention;
extern const AttentionKernel naive_attention;
}  // namespace cuda
#endif

namespace cpu {
extern const AttentionKernel simd_attention;
extern const AttentionKernel reference_attention;
}  // namespace cpu

}  // namespace tilewise
