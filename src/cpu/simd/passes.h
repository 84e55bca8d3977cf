#pragma once

#include "attention/call.h"
#include "cpu/simd/targets.h"
#include "hwy/highway.h"
#include "tilewise/context.h"

// The two passes, once in the namespace of each target they are compiled for.
#define TILEWISE_DECLARE_PASSES(target)                                              \
  namespace tilewise::cpu::simd::target {                                            \
  std::size_t forward_workspace(const AttentionCall& call, const Context& context);  \
  std::size_t backward_workspace(const AttentionCall& call, const Context& context); \
  void forward(const AttentionCall& call, const Context& context);                   \
  void backward(const AttentionCall& call, const Context& context);                  \
  }

#if HWY_ARCH_X86 && (HWY_TARGETS & HWY_AVX3)
TILEWISE_DECLARE_PASSES(N_AVX3)
#endif
#if HWY_ARCH_X86 && (HWY_TARGETS & HWY_AVX2)
TILEWISE_DECLARE_PASSES(N_AVX2)
#endif
#if HWY_ARCH_X86 && (HWY_TARGETS & HWY_SSE4)
TILEWISE_DECLARE_PASSES(N_SSE4)
#endif
#if !HWY_ARCH_X86
TILEWISE_DECLARE_PASSES(HWY_NAMESPACE)
#endif

#undef TILEWISE_DECLARE_PASSES
