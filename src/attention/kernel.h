#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise {

/// One way to compute attention, both passes: `call.problem.pass` says which is asked.
struct AttentionKernel {
  std::string_view name;
  /// Empty when it can take the problem, else the reason why not.
  std::string (*supports)(const AttentionProblem&);
  /// Bytes of workspace for the call.
  std::size_t (*workspace)(const AttentionCall&, const Context&);
  /// Runs the call, which was checked and is supported; context.workspace is large enough and aligned to 64.
  void (*launch)(const AttentionCall&, const Context&);
};

/// All of them, fastest first, the plain reference last. Choosing walks this list.
std::span<const AttentionKernel> attention_kernel_list();

/// Throws InvalidArgument, listing the known names, unless `name` is "auto" or in the list.
void check_kernel_name(std::string_view name);

/// The kernel of that name, or the first able one for "auto". Throws Unsupported, with the reasons, when
/// there is none that can.
const AttentionKernel& choose_attention_kernel(const AttentionProblem& problem, std::string_view name);

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const AttentionKernel mma_attention;
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
