#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

/// A selection of heads, for kernels that leave some heads of a call to `fused`. A head is selected if its
/// query head or its key head is marked. Without `queries`, every head is.
struct SomeHeads {
  const int* queries = nullptr;  ///< [B, Hq], on the device
  const int* keys = nullptr;     ///< [B, Hkv]
  const int* any = nullptr;      ///< 0 if no head is marked

  constexpr bool none() const { return any != nullptr && *any == 0; }

  constexpr bool has(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    return queries == nullptr || queries[b * call.problem.heads_q + h] != 0 ||
           keys[b * call.problem.heads_kv + h / call.group()] != 0;
  }
  /// Whether any query head that shares key head h is selected.
  constexpr bool has_group(const AttentionCall& call, std::int64_t b, std::int64_t h) const {
    if (queries == nullptr) return true;
    for (std::int64_t n = 0; n < call.group(); ++n) {
      if (has(call, b, h * call.group() + n)) return true;
    }
    return false;
  }
};

void fused_forward(const AttentionCall& call, const Context& context);
/// Computes only the selected heads.
void fused_forward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context);
void fused_backward(const AttentionCall& call, const Context& context);
/// Computes only the groups of query heads with a selected head. The call must pass takes_some_heads().
void fused_backward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context);
bool takes_some_heads(const AttentionCall& call);
/// Bytes of shared memory per CTA of fused_backward_of(); `dim` is the larger of D and Dv.
std::size_t some_heads_shared_bytes(std::int64_t dim);
std::size_t fused_backward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::simt
