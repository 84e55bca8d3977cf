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

// A matrix product with a fused epilogue:
//   out = f(a·bᵀ + bias) + residual
// or, gated, where gate and b may be two tensors, as checkpoints store them, or two views of one tensor:
//   out = f(a·gateᵀ + gate_bias) ⊙ (a·bᵀ + bias) + residual
// Here f is the activation. With `accumulate` the result is added to out.
//
// Matrices may be row-major or column-major: one of the two dimensions must be contiguous, and the other may
// have any stride. So the same function computes the products of a backward pass on other views: with y =
// x·wᵀ, dx [M, K] is the product with a = dy [M, N] and b = wᵀ [K, N], and dw [N, K] that with a = dyᵀ [N, M]
// and b = xᵀ [K, M].

struct GemmInputs {
  Tensor a{};          ///< [M, K]
  Tensor b{};          ///< [N, K], like the weight of torch's Linear
  Tensor bias{};       ///< [N], type of a or f32; optional
  Tensor gate{};       ///< [N, K], contiguous in the same dimension as b; optional
  Tensor gate_bias{};  ///< [N], type of a or f32; optional
  /// [M, N], row-major, type of out; optional. May be the same memory as out.
  Tensor residual{};
};

struct GemmOptions {
  Activation activation = Activation::none;
  bool accumulate = false;  ///< out += instead of out =
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
};

struct GemmOutputs {
  Tensor out{};  ///< [M, N], row-major, type of a or f32
};

/// All arguments are checked before anything is written. Sums are f32 (f64 for f64 inputs).
void gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
          const Context& context);

/// The bytes of workspace that the call needs.
std::size_t gemm_workspace(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                           const Context& context);

Explanation explain_gemm(const GemmInputs& inputs, const GemmOptions& options, const GemmOutputs& outputs,
                         const Context& context);

/// Names of all gemm kernels, fastest first.
std::vector<std::string_view> gemm_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
