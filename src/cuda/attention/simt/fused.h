#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

/// Heads that a call is for, where it is not for all: those marked by either.
struct SomeHeads {
  const int* queries = nullptr;  ///< [B, Hq], on the device
  const int* keys = nullptr;     ///< [B, Hkv]
  const int* any = nullptr;      ///< 0 where none is marked

  constexpr bool none() const { return any != nullptr && *any == 0; }

  constexpr bool has(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    return queries == nullptr || queries[b * call.problem.heads_q + h] != 0 ||
           keys[b * call.problem.heads_kv + h / call.group()] != 0;
  }
  /// The same of all query heads that share key head h.
  constexpr bool has_group(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    if (queries == nullptr) return true;
    for (std::int64_t n = 0; n < call.group(); ++n) {
      if (has(call, b, h * call.group() + n)) return true;
    }
    return false;
  }
};

void fused_forward(const AttentionCall& call, const Context& context);
/// The same for some heads alone.
void fused_forward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context);
void fused_backward(const AttentionCall& call, const Context& context);
/// The same for groups of some heads alone; for calls that takes_some_heads allows.
void fused_backward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context);
bool takes_some_heads(const AttentionCall& call);
/// Shared memory that a block of it needs, by the larger head dim.
std::size_t some_heads_shared_bytes(std::int64_t dim);
std::size_t fused_backward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::simt
