#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

/// Heads that a call is for, where it is not for all: those marked by either.
struct SomeHeads {
  const int* queries = nullptr;  ///< [B, Hq], on the device
  const int* keys = nullptr;     ///< [B, Hkv]

  constexpr bool has(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    return queries == nullptr || queries[b * call.problem.heads_q + h] != 0 ||
           keys[b * call.problem.heads_kv + h / call.group()] != 0;
  }
};

void fused_forward(const AttentionCall& call, const Context& context);
/// The same for some heads alone.
void fused_forward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context);
void fused_backward(const AttentionCall& call, const Context& context);
std::size_t fused_backward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::simt
