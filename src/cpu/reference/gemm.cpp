#include "core/activation.h"
#include "core/parallel.h"
#include "cpu/reference/elements.h"
#include "gemm/kernel.h"

namespace tilewise::cpu {
namespace {

std::string supports(const GemmProblem& problem) {
  return problem.device.type == Device::Type::cpu ? "" : "runs on the CPU only";
}

std::size_t workspace(const GemmCall&, const Context&) { return 0; }

void launch(const GemmCall& call, const Context& context) {
  const GemmProblem& problem = call.problem;
  for_each_task(context.parallel_for, problem.m, [&](std::int64_t, std::int64_t m) {
    for (std::int64_t n = 0; n < problem.n; ++n) {
      double value = product(call.a, call.b, call.bias, m, n);
      if (problem.gated) {
        value *= activated(problem.activation, product(call.a, call.gate, call.gate_bias, m, n));
      } else {
        value = activated(problem.activation, value);
      }
      if (problem.residual) value += element(call.residual, m, n);
      if (problem.accumulate) value += element(call.out, m, n);
      store(call.out, m, n, value);
    }
  });
}

}  // namespace

constinit const GemmKernel reference_gemm = {
    .name = "reference", .supports = supports, .workspace = workspace, .launch = launch};

}  // namespace tilewise::cpu
