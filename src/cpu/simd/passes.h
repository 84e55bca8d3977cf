#pragma once

#include "attention/call.h"
#include "ffn/steps.h"
#include "gemm/call.h"
#include "norm/call.h"
#include "rope/call.h"
#include "tilewise/context.h"
#if !defined(__x86_64__)
#include "cpu/simd/targets.h"
#include "hwy/highway.h"
#endif

// The entry points of the CPU kernels, declared once in the namespace of each target.
#define TILEWISE_DECLARE_PASSES(target)                                              \
  namespace tilewise::cpu::simd::target {                                            \
  std::size_t forward_workspace(const AttentionCall& call, const Context& context);  \
  std::size_t backward_workspace(const AttentionCall& call, const Context& context); \
  void forward(const AttentionCall& call, const Context& context);                   \
  void backward(const AttentionCall& call, const Context& context);                  \
  std::size_t gemm_workspace(const GemmCall& call, const Context& context);          \
  void gemm(const GemmCall& call, const Context& context);                           \
  std::size_t norm_workspace(const NormCall& call, const Context& context);          \
  void norm(const NormCall& call, const Context& context);                           \
  std::size_t rope_workspace(const RopeCall& call, const Context& context);          \
  void rope(const RopeCall& call, const Context& context);                           \
  void activation_pass(const ActivationPass& call, const Context& context);          \
  std::size_t sum_rows_workspace(const Matrix& x, const Context& context);           \
  void sum_rows(const Matrix& x, const Vector& sums, const Context& context);        \
  void round(const Matrix& from, const Matrix& to, const Context& context);          \
  void add(const Matrix& x, const Matrix& to, const Context& context);               \
  }

#if defined(__x86_64__)  // Highway's names, written out: its headers cannot be included where its targets are
                         // not enabled
TILEWISE_DECLARE_PASSES(N_AVX3)
TILEWISE_DECLARE_PASSES(N_AVX2)
TILEWISE_DECLARE_PASSES(N_SSE4)
#else
TILEWISE_DECLARE_PASSES(HWY_NAMESPACE)
#endif

#undef TILEWISE_DECLARE_PASSES
