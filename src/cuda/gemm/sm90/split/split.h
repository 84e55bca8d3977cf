#pragma once

#include <cstddef>

#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

// Products of f32 on tensor cores. Factors are split into parts of 16 bits by a pass of its own, and products
// of parts are summed. There are two ways:
//   f16: each row of a factor is multiplied by the power of two that brings its largest number to 2^14, and
//     each number is two parts, high + low; low·high, high·low and high·high make f32's precision. Where TF32
//     is allowed high·high does, f16 having as many digits.
//   bf16: three parts, six products; two parts and three products where TF32 is allowed. No range is too
//     wide for it.
// The first takes half the time. What its range cannot hold is found out on the device while it splits, and
// the second way taken for the whole product. Tiles of the result with infinite numbers or NaN in their
// factors, whose parts would not add up, are left to the simt kernel.

void run_split(const GemmCall& call, const Context& context);
std::size_t split_workspace(const GemmCall& call, const Context& context);

}  // namespace tilewise::cuda::gemm
