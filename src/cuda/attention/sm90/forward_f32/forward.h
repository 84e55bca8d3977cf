#pragma once

#include <cstddef>

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_f32 {

void forward(const AttentionCall& call, const Context& context);
std::size_t forward_workspace(const AttentionCall& call);

}  // namespace tilewise::cuda::wgmma_f32
