#pragma once

#include "attention/call.h"

namespace tilewise::cpu {

/// Writes O = 0 and LSE = −inf to the rows of packed tensors that no sequence owns.
void clear_unused_outputs(const AttentionCall& call);

/// Writes 0 to the gradients of such rows, and to those of keys past an entry's length.
void clear_unused_gradients(const AttentionCall& call);

}  // namespace tilewise::cpu
