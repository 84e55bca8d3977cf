#pragma once

#include "norm/call.h"

namespace tilewise {

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
NormCall checked_norm_forward(const NormInputs& inputs, const NormOptions& options,
                              const NormOutputs& outputs, const Context& context);
NormCall checked_norm_backward(const NormInputs& inputs, const NormOptions& options,
                               const NormGradients& gradients, const Context& context);

}  // namespace tilewise
