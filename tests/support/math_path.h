#pragma once

#include "support/open_problem.h"
#include "tilewise/dtype.h"

namespace tilewise::test {

/// What PyTorch's math path computes (scaled_dot_product_attention's plain composition of matmul, softmax and
/// matmul, and its autograd) with tensors of type `dtype`: √scale goes to q and k each, products accumulate
/// in f32, and every intermediate tensor (scores, weights and the gradients of both) is rounded to `dtype`.
/// f64 is the formula without any rounding to speak of. Rows without keys give zeros, as the contract says.
Results math_path(const OpenProblem& problem, DType dtype);

}  // namespace tilewise::test
