#pragma once

#include <string>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_halves {

/// Forward of f16 and bf16 at head dims of 257 to 512; see halves.cu.
inline constexpr int most_dim = 512;

/// Why a problem is not for this kernel, beside what concerns the device; empty where it is.
std::string unsuited(const AttentionProblem& problem);

void forward(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cuda::wgmma_halves
