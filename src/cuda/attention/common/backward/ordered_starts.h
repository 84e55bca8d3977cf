#pragma once

#include <cstddef>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// Backward adds up what several blocks find of a row, and blocks may wait for each other: rows that two
// sequences have would be added up twice, and waited for by two orders at once. Cumulative lengths on a
// device may say so, since nobody has looked at them. So a packed backward reads copies in which they never
// fall, and its sequences lie apart.

/// Bytes of workspace for the copies, a multiple of its alignment; 0 but for a packed backward.
std::size_t ordered_starts_bytes(const AttentionCall& call);

/// The call with such copies, which lie at the beginning of the workspace; `context` is left with the rest.
AttentionCall with_ordered_starts(const AttentionCall& call, Context& context);

}  // namespace tilewise::cuda::simt
