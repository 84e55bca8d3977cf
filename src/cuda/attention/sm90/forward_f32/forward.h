#pragma once

#include <cstddef>

#include "attention/call.h"
#include "core/kernel_list.h"
#include "tilewise/context.h"

namespace tilewise::cuda::wgmma_f32 {

/// Runs with the row of the table that configure_forward() chose.
void forward(const AttentionCall& call, int row, const Context& context);
Configuration configure_forward(const AttentionCall& call);

}  // namespace tilewise::cuda::wgmma_f32
