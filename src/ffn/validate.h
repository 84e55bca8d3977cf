#pragma once

#include "ffn/call.h"

namespace tilewise {

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
FfnCall checked_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                            const Context& context);
FfnCall checked_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                             const FfnGradients& gradients, const Context& context);

}  // namespace tilewise
