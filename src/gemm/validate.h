#pragma once

#include "gemm/call.h"

namespace tilewise {

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
GemmCall checked_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                      const Context& context);

}  // namespace tilewise
