#include <string>

#include "attention/kernel.h"
#include "cpu/simd/levels.h"

namespace tilewise::cpu {
namespace simd {
namespace {

constexpr PerLevel<std::size_t(const AttentionCall&, const Context&)> forward_workspace = {
    TILEWISE_EACH_LEVEL(forward_workspace)};
constexpr PerLevel<std::size_t(const AttentionCall&, const Context&)> backward_workspace = {
    TILEWISE_EACH_LEVEL(backward_workspace)};
constexpr PerLevel<void(const AttentionCall&, const Context&)> forward = {TILEWISE_EACH_LEVEL(forward)};
constexpr PerLevel<void(const AttentionCall&, const Context&)> backward = {TILEWISE_EACH_LEVEL(backward)};

std::string supports(const AttentionProblem& problem) {
  if (problem.device.type != Device::Type::cpu) return "runs on the CPU only";
  if (!has_level()) return "this CPU has none of the vector instruction sets it needs";
  if (problem.dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  if (problem.layout == Layout::paged && problem.pass == Pass::backward) return "paged keys have no backward";
  return {};
}

std::size_t workspace(const AttentionCall& call, const Context& context) {
  const bool is_forward = call.problem.pass == Pass::forward;
  return at_level(is_forward ? forward_workspace : backward_workspace, context)(call, context);
}

void launch(const AttentionCall& call, const Context& context) {
  if (call.dropout.words != nullptr) return launch(with_drawn_dropout(call), context);
  at_level(call.problem.pass == Pass::forward ? forward : backward, context)(call, context);
}

}  // namespace
}  // namespace simd

constinit const AttentionKernel simd_attention = {
    .name = "simd", .supports = simd::supports, .workspace = simd::workspace, .launch = simd::launch};

}  // namespace tilewise::cpu
