#pragma once

#include <cstdint>

#include "tilewise/attention.h"

namespace tilewise::test {

/// attention_forward and attention_backward of a dense problem, cut into pieces of entries, heads, queries
/// and keys and joined again in f64. The cuts are drawn from the seed.
void forward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                       const AttentionOutputs& outputs, const Context& context);
void backward_in_pieces(std::uint64_t seed, const AttentionInputs& inputs, const AttentionOptions& options,
                        const AttentionGradients& gradients, const Context& context);

}  // namespace tilewise::test
