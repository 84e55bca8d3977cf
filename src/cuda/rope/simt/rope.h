#pragma once

#include "rope/call.h"
#include "tilewise/context.h"

namespace tilewise::cuda {

void run_rope(const RopeCall& call, const Context& context);

}  // namespace tilewise::cuda
