#pragma once

#include "support/open_problem.h"

namespace tilewise::test {

/// What PyTorch's math path gives (scaled_dot_product_attention's plain composition of matmul, softmax and
/// matmul, and its autograd; 2.13): everything in f32, f16 and bf16 widened on the way in and results rounded
/// on the way out; √scale goes to q and k each; sums are made in the order its matrix products and its
/// softmax make them in. lse is what torch.logsumexp would give of the scores. Rows without keys give zeros,
/// as the contract says. docs/numerics.md compares it with the real one.
Results math_path(const OpenProblem& problem);

/// What PyTorch gives with products of 16 bits, which is what FlashAttention measures itself against: scale ·
/// q, S = q · kᵀ, P, dP and dS are rounded to the type of the inputs, softmax and sums are f32. For f32
/// inputs it is the math path.
Results half_path(const OpenProblem& problem);

/// The same as math_path in f64.
Results formula(const OpenProblem& problem);

}  // namespace tilewise::test
