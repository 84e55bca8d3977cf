#pragma once

#include "attention/call.h"
#include "core/contents.h"
#include "tilewise/attention.h"
#include "tilewise/plan.h"

namespace tilewise {

/// Checks every argument and gives the call in the form kernels read. Throws InvalidArgument; writes nothing.
AttentionCall checked_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                              const AttentionOutputs& outputs, const Context& context,
                              ResultMemory memory = ResultMemory::callers,
                              Contents contents = Contents::checked);
AttentionCall checked_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                               const AttentionGradients& gradients, const Context& context,
                               ResultMemory memory = ResultMemory::callers,
                               Contents contents = Contents::checked);

/// The part of it that both passes share: everything but outputs and gradients.
AttentionCall checked_inputs(Pass pass, const AttentionInputs& inputs, const AttentionOptions& options,
                             const Context& context, Contents contents = Contents::checked);

// Other tensors for a call that was checked.

/// Throws InvalidArgument unless the tensors are given, typed, shaped, strided and aligned as `planned`.
void check_same_form(const AttentionInputs& planned, const AttentionInputs& inputs);
void check_same_form(const AttentionOutputs& planned, const AttentionOutputs& outputs);
void check_same_form(const AttentionGradients& planned, const AttentionGradients& gradients);

/// That what is written overlaps with nothing else.
void check_apart(const AttentionInputs& inputs, const AttentionOutputs& outputs);
void check_apart(const AttentionInputs& inputs, const AttentionGradients& gradients);

/// Makes a call, whose problem is known, one on these tensors.
void set_views(const AttentionInputs& inputs, AttentionCall& call);
void set_views(const AttentionOutputs& outputs, AttentionCall& call);
void set_views(const AttentionGradients& gradients, AttentionCall& call);

}  // namespace tilewise
