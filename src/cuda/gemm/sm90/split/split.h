#pragma once

#include <cstddef>

#include "cuda/gemm/common/items.h"
#include "gemm/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::gemm {

// GEMM of f32 on tensor cores. A pass of its own splits A and B into 16-bit parts, and the GEMM adds the
// products of parts. There are two ways:
//
// - f16: each row of an operand is multiplied by the power of two that brings its largest number to 2^14.
//   A number is the sum of two parts, high + low. The products low·high, high·low and high·high give f32's
//   precision. Where TF32 is allowed, high·high alone suffices, because f16 has as many digits.
// - bf16: three parts and six products; two parts and three products where TF32 is allowed. Any range fits.
//
// f16 takes half the time. The pass that splits counts, on the device, what the range of f16 cannot hold; if
// that may lose too much, the whole GEMM takes the bf16 way. Infinities and NaN cannot be split: tiles of the
// result whose operands contain one are left to the simt kernel.

void run_split(const GemmCall& call, const Context& context);
std::size_t split_workspace(const GemmCall& call, const Context& context);

/// The same for several GEMMs of one shape, with the same number of launches. The call is the first one. It
/// has no gate, bias, activation or residual, but it may accumulate.
void run_split_items(const GemmCall& call, const Items& items, const Context& context);
std::size_t split_items_workspace(const GemmCall& call, const Items& items);

/// Into how many slices K of `items` GEMMs with n columns is cut at most, so that SMs have equal work.
int choose_slices(const VisibleBand& visible, std::int64_t items, std::int64_t n, int most,
                  int multiprocessors);
/// The longest slice, in stages, with which there are no more than so many.
int longest_slice(const VisibleBand& visible, int slices);

}  // namespace tilewise::cuda::gemm
