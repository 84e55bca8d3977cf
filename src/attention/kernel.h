#pragma once

#include <span>
#include <string_view>

#include "attention/call.h"
#include "core/kernel_list.h"

namespace tilewise {

/// One way to compute attention, both passes: `call.problem.pass` says which is asked.
using AttentionKernel = Kernel<AttentionProblem, AttentionCall>;

/// All of them, fastest first, the plain reference last. Choosing walks this list.
std::span<const AttentionKernel> attention_kernel_list();

/// The kernel of that name, or the first able one for "auto". Throws Unsupported, with the reasons, when
/// there is none that can.
const AttentionKernel& choose_attention_kernel(const AttentionProblem& problem, std::string_view name);

/// Looks at what index tensors hold, and throws what is wrong. Those of a CUDA device are looked at where
/// that was asked for: by a kernel, and the call waits for the stream.
void check_indices(const AttentionCall& call, const Context& context);

/// The call with dropout's seed and offset read, where they are in memory: for kernels of the CPU, which read
/// them when they begin.
inline AttentionCall with_drawn_dropout(const AttentionCall& call) {
  AttentionCall drawn = call;
  drawn.dropout = call.dropout.drawn();
  return drawn;
}

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const AttentionKernel wgmma_attention;
extern const AttentionKernel wgmma_lagged_attention;  ///< this and the next two where trial kernels are built
extern const AttentionKernel wgmma_persistent_attention;
extern const AttentionKernel wgmma_halves_attention;
extern const AttentionKernel mma_attention;
extern const AttentionKernel widened_attention;
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
