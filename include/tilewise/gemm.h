#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "tilewise/activation.h"
#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// A product of matrices and what is done to its elements while they are still in registers:
//   out = f(a·bᵀ + bias) + residual
// or, gated, with the weights of gate and up apart, as checkpoints store them, or as two views of one tensor:
//   out = f(a·gateᵀ + gate_bias) ⊙ (a·bᵀ + bias) + residual
// where f is the activation, and out is added to instead of set with `accumulate`.
//
// Matrices may lie in memory by rows or by columns: of their two dimensions one must be contiguous, the other
// may have any stride. So the products of a backward pass are the same function on other views: with y =
// x·wᵀ, dx [M, K] is made of a = dy [M, N] and b = wᵀ [K, N], dw [N, K] of a = dyᵀ [N, M] and b = xᵀ [K, M].

struct GemmInputs {
  Tensor a{};          ///< [M, K]
  Tensor b{};          ///< [N, K], as the weight of torch's Linear
  Tensor bias{};       ///< [N], type of a or f32; optional
  Tensor gate{};       ///< [N, K], contiguous in the same dimension as b; optional
  Tensor gate_bias{};  ///< [N], type of a or f32; optional
  /// [M, N], by rows, type of out; optional. May be the memory of out itself.
  Tensor residual{};
};

struct GemmOptions {
  Activation activation = Activation::none;
  bool accumulate = false;  ///< out += instead of out =
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
};

struct GemmOutputs {
  Tensor out{};  ///< [M, N], by rows, type of a or f32
};

/// Every check is made before anything is written. Sums are made in f32 (f64 where the inputs are).
void gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
          const Context& context);

/// Bytes of workspace the call will need.
std::size_t gemm_workspace(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                           const Context& context);

Explanation explain_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                         const Context& context);

/// Names of all gemm kernels, fastest first.
std::vector<std::string_view> gemm_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
