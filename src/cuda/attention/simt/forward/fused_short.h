#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

/// A CTA's queries, and the largest head dim.
struct ShortTile {
  static constexpr int queries = 64;
  static constexpr int dim = 128;
};

/// Forward for few keys at large head dims. The call must pass takes_short().
void short_forward(const AttentionCall& call, const Context& context);

/// Whether short_forward() can compute a call that the plain kernels of fused.cu take.
bool takes_short(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::simt
