#pragma once

#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.cuh"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

/// The epilogue of one element: bias, activation, gate, residual, and the store. `x` and `gate` are the
/// accumulators of B and of the gate.
template <typename T, bool approximate>
__device__ __forceinline__ void finish_element(const GemmCall& call, std::int64_t m, std::int64_t n, float x,
                                               float gate) {
  const GemmProblem& problem = call.problem;
  if (m >= problem.m || n >= problem.n) return;
  if (call.bias.data != nullptr) x += bias_at<T>(call.bias, n);
  if (problem.gated && call.gate_bias.data != nullptr) gate += bias_at<T>(call.gate_bias, n);
  with_activation(problem.activation, [&]<Activation f>() {
    x = problem.gated ? activate<f, approximate>(gate) * x : activate<f, approximate>(x);
  });
  std::byte* to = call.out.at(m, n);
  if (problem.residual) x += load_element(call.residual.at(m, n), call.out.dtype);
  if (problem.accumulate) x += load_element(to, call.out.dtype);
  store_element(to, call.out.dtype, x);
}

}  // namespace tilewise::cuda::gemm
