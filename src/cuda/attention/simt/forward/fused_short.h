#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

/// What a block has.
struct ShortTile {
  static constexpr int queries = 64;
  static constexpr int dim = 128;
};

/// Forward of few keys at large head dims, for calls that takes_short allows.
void short_forward(const AttentionCall& call, const Context& context);

/// Whether it can, of calls that the plain kernels of fused.cu take.
bool takes_short(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::simt
