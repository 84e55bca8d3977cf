#pragma once

#include <cstdint>

#include "attention/call.h"
#include "tilewise/attention.h"

namespace tilewise {

/// Whose memory results go to. A caller's may overlap with what is read, so that is looked into.
enum class ResultMemory : std::uint8_t { callers, fresh };

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
AttentionCall checked_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                              const AttentionOutputs& outputs, const Context& context,
                              ResultMemory memory = ResultMemory::callers);
AttentionCall checked_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                               const AttentionGradients& gradients, const Context& context,
                               ResultMemory memory = ResultMemory::callers);

/// The part of it that both passes share: everything but outputs and gradients.
AttentionCall checked_inputs(Pass pass, const AttentionInputs& inputs, const AttentionOptions& options,
                             const Context& context);

/// The parts of it that read index tensors: lengths, pages, blocks. CPU memory only.
void check_indices(const AttentionInputs& inputs, const AttentionCall& call);

}  // namespace tilewise
