#pragma once

#include "support/open_problem.h"

namespace tilewise::test {

/// The results of PyTorch's math path (2.13): scaled_dot_product_attention's plain composition of matmul,
/// softmax and matmul, and its autograd. It computes in f32: f16 and bf16 inputs are widened and results are
/// rounded at the end. q and k are each multiplied by √scale. Sums are in the order of PyTorch's matrix
/// products and softmax. LSE is that of torch.logsumexp. Empty rows give zeros, as the contract says.
/// docs/numerics.md compares this with the real path.
Results math_path(const OpenProblem& problem);

/// The results of PyTorch with 16-bit products, with which FlashAttention's tests compare: scale · q, S = q ·
/// kᵀ, P, dP and dS are rounded to the type of the inputs; softmax and sums are f32. For f32 inputs it is the
/// math path.
Results half_path(const OpenProblem& problem);

/// The same as math_path, but in f64.
Results formula(const OpenProblem& problem);

}  // namespace tilewise::test
