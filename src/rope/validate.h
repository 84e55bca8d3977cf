#pragma once

#include "core/contents.h"
#include "rope/call.h"

namespace tilewise {

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
RopeCall checked_rope(const RopeInputs& inputs, const RopeOptions& options, const RopeOutputs& outputs,
                      const Context& context, Contents contents = Contents::checked);

}  // namespace tilewise
