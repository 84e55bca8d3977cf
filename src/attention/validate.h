#pragma once

#include "attention/call.h"
#include "core/contents.h"
#include "tilewise/attention.h"
#include "tilewise/plan.h"

namespace tilewise {

/// Checks every argument and returns the call in the form that kernels read. Throws InvalidArgument; writes
/// nothing.
AttentionCall checked_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                              const AttentionOutputs& outputs, const Context& context,
                              ResultMemory memory = ResultMemory::callers,
                              Contents contents = Contents::checked);
AttentionCall checked_backward(const AttentionInputs& inputs, const AttentionOptions& options,
                               const AttentionGradients& gradients, const Context& context,
                               ResultMemory memory = ResultMemory::callers,
                               Contents contents = Contents::checked);

/// The part of these checks that both passes share: everything but outputs and gradients.
AttentionCall checked_inputs(Pass pass, const AttentionInputs& inputs, const AttentionOptions& options,
                             const Context& context, Contents contents = Contents::checked);

// The functions below replace the tensors of a checked call by others.

/// Throws InvalidArgument unless the same tensors are given as in `planned`, with the same types, shapes,
/// strides and alignment.
void check_same_form(const AttentionInputs& planned, const AttentionInputs& inputs);
void check_same_form(const AttentionOutputs& planned, const AttentionOutputs& outputs);
void check_same_form(const AttentionGradients& planned, const AttentionGradients& gradients);

/// Throws InvalidArgument if a tensor that is written overlaps another one.
void check_apart(const AttentionInputs& inputs, const AttentionOutputs& outputs);
void check_apart(const AttentionInputs& inputs, const AttentionGradients& gradients);

/// Makes the call use these tensors. Its problem stays.
void set_views(const AttentionInputs& inputs, AttentionCall& call);
void set_views(const AttentionOutputs& outputs, AttentionCall& call);
void set_views(const AttentionGradients& gradients, AttentionCall& call);

}  // namespace tilewise
