#pragma once

#include "attention/call.h"
#include "tilewise/context.h"
#if !defined(__x86_64__)
#include "cpu/simd/targets.h"
#include "hwy/highway.h"
#endif

// The two passes, once in the namespace of each target they are compiled for.
#define TILEWISE_DECLARE_PASSES(target)                                              \
  namespace tilewise::cpu::simd::target {                                            \
  std::size_t forward_workspace(const AttentionCall& call, const Context& context);  \
  std::size_t backward_workspace(const AttentionCall& call, const Context& context); \
  void forward(const AttentionCall& call, const Context& context);                   \
  void backward(const AttentionCall& call, const Context& context);                  \
  }

#if defined(__x86_64__)  // by Highway's names, but without its headers, which want their instructions at once
TILEWISE_DECLARE_PASSES(N_AVX3)
TILEWISE_DECLARE_PASSES(N_AVX2)
TILEWISE_DECLARE_PASSES(N_SSE4)
#else
TILEWISE_DECLARE_PASSES(HWY_NAMESPACE)
#endif

#undef TILEWISE_DECLARE_PASSES
