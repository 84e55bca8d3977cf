#include "cpu/reference/reference.h"

#include "attention/kernel.h"

namespace tilewise::cpu {
namespace {

std::string supports(const AttentionProblem& problem) {
  if (problem.device.type != Device::Type::cpu) return "runs on the CPU only";
  if (problem.layout == Layout::paged && problem.pass == Pass::backward) return "paged keys have no backward";
  return {};
}

std::size_t workspace(const AttentionCall& call, const Context& context) {
  return call.problem.pass == Pass::forward ? reference::forward_workspace(call, context)
                                            : reference::backward_workspace(call, context);
}

void launch(const AttentionCall& call, const Context& context) {
  if (call.dropout.words != nullptr) return launch(with_drawn_dropout(call), context);
  if (call.problem.pass == Pass::forward) {
    reference::forward(call, context);
  } else {
    reference::backward(call, context);
  }
}

}  // namespace

constinit const AttentionKernel reference_attention = {
    .name = "reference", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cpu
