#pragma once

#include "attention/index_rules.h"
#include "rope/index_rules.h"
#include "tilewise/context.h"

namespace tilewise::cuda {

/// The first fault of index tensors on a device, which a kernel looks for: see core/index_fault.h. Waits for
/// the stream. Throws Unsupported where that is captured into a graph.
AttentionFault first_fault(const AttentionIndices& indices, const Context& context);
RopeFault first_fault(const RopeIndices& indices, const Context& context);

}  // namespace tilewise::cuda
