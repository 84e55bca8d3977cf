#pragma once

#include <cstddef>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::simt {

// In backward several CTAs add to one row, and CTAs may wait for one another. A row that belongs to two
// sequences would be added to twice, and two orders at once would wait for it. Cumulative lengths in device
// memory may say so, since the host has not checked them. So a packed backward reads copies that never fall,
// in which sequences do not overlap.

/// Bytes of workspace for the copies, a multiple of the workspace's alignment; 0 unless the call is a packed
/// backward.
std::size_t ordered_starts_bytes(const AttentionCall& call);

/// The call with these copies, which are written to the start of the workspace. `context` keeps the rest of
/// it.
AttentionCall with_ordered_starts(const AttentionCall& call, Context& context);

}  // namespace tilewise::cuda::simt
