#pragma once

#include "attention/call.h"

namespace tilewise::cpu {

/// Rows of packed tensors that no sequence owns: o = 0, lse = −inf.
void clear_unused_outputs(const AttentionCall& call);

/// The same for gradients, and for keys past an entry's length: 0.
void clear_unused_gradients(const AttentionCall& call);

}  // namespace tilewise::cpu
