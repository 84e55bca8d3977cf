#include <array>

#include "attention/kernel.h"
#include "core/check.h"

namespace tilewise {

std::span<const AttentionKernel> attention_kernel_list() {
  static const std::array kernels = {
#ifdef TILEWISE_HAS_CUDA
      cuda::mma_attention, cuda::fused_attention,   cuda::tiled_attention, cuda::naive_attention,
#endif
      cpu::simd_attention, cpu::reference_attention};
  return kernels;
}

void check_kernel_name(std::string_view name) {
  if (name == "auto") return;
  std::string names = "auto";
  for (const AttentionKernel& kernel : attention_kernel_list()) {
    if (name == kernel.name) return;
    names += ", " + std::string(kernel.name);
  }
  reject("kernel", "one of " + names, "'" + std::string(name) + "'");
}

const AttentionKernel& choose_attention_kernel(const AttentionProblem& problem, std::string_view name) {
  check_kernel_name(name);
  std::string reasons;
  for (const AttentionKernel& kernel : attention_kernel_list()) {
    if (name != "auto" && name != kernel.name) continue;
    const std::string reason = kernel.supports(problem);
    if (reason.empty()) return kernel;
    reasons += "\n  " + std::string(kernel.name) + ": " + reason;
  }
  throw Unsupported("kernel '" + std::string(name) + "' cannot take this problem (" + to_string(problem) +
                    "):" + reasons);
}

std::vector<std::string_view> attention_kernels() {
  std::vector<std::string_view> names;
  for (const AttentionKernel& kernel : attention_kernel_list()) names.push_back(kernel.name);
  return names;
}

}  // namespace tilewise
