#pragma once

#include "attention/call.h"
#include "tilewise/context.h"

namespace tilewise::cpu::reference {

void forward(const AttentionCall& call, const Context& context);
void backward(const AttentionCall& call, const Context& context);
std::size_t forward_workspace(const AttentionCall& call, const Context& context);
std::size_t backward_workspace(const AttentionCall& call, const Context& context);

}  // namespace tilewise::cpu::reference
