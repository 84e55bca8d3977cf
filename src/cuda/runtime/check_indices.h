#pragma once

#include "attention/index_rules.h"
#include "rope/index_rules.h"
#include "tilewise/context.h"

namespace tilewise::cuda {

/// The first fault of index tensors on a device (core/index_fault.h), found by a kernel. Waits for the
/// stream. Throws Unsupported if the stream is being captured into a graph.
AttentionFault first_fault(const AttentionIndices& indices, const Context& context);
RopeFault first_fault(const RopeIndices& indices, const Context& context);

}  // namespace tilewise::cuda
