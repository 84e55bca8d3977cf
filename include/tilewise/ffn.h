#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tilewise/activation.h"
#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// The feed-forward network of a transformer layer, on M tokens:
//   out = h·downᵀ + down_bias + residual,  h = f(x·upᵀ + up_bias)
// or, gated,                               h = f(x·gateᵀ + gate_bias) ⊙ (x·upᵀ + up_bias).
// Tokens are processed in chunks, so that h, the largest intermediate result, never exceeds a bound.

struct FfnInputs {
  Tensor x{};          ///< [M, E], row-major
  Tensor up{};         ///< [F, E]
  Tensor gate{};       ///< [F, E]; optional
  Tensor down{};       ///< [O, F]; in all common models O = E
  Tensor up_bias{};    ///< [F]; biases are optional, and have the type of x or f32
  Tensor gate_bias{};  ///< [F]
  Tensor down_bias{};  ///< [O]
  Tensor residual{};   ///< [M, O], row-major; optional. May be the same memory as out.
};

struct FfnOptions {
  Activation activation = Activation::gelu;
  /// An upper bound on the bytes of intermediate results, rounded up to those of one token (in backward: of
  /// 64 hidden features of all tokens). 0: as many as are fastest. In forward on a GPU it also bounds the
  /// copies in 16-bit parts that f32 products keep of their weights, down to copies of 128 columns. Results
  /// do not depend on it, except for the rounding of sums over tokens in the gradients of weights and of
  /// products in parts.
  std::size_t max_intermediate_bytes = 0;
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
};

struct FfnOutputs {
  Tensor out{};  ///< [M, O], row-major
  /// x·upᵀ + up_bias and, for a gated network, x·gateᵀ + gate_bias, which backward can read. [M, F],
  /// row-major; optional, both or none. max_intermediate_bytes does not count them.
  Tensor up_product{};
  Tensor gate_product{};
};

/// What backward reads (d_out and the products) and what it writes. It computes only the gradients for which
/// tensors are given. The gradient of the residual is d_out itself.
struct FfnGradients {
  Tensor d_out{};  ///< [M, O], row-major
  Tensor dx{};     ///< each gradient has the shape and type of its input
  Tensor d_up{};
  Tensor d_gate{};
  Tensor d_down{};
  Tensor d_up_bias{};
  Tensor d_gate_bias{};
  Tensor d_down_bias{};
  Tensor up_product{};  ///< of forward; if not given, they are computed again from x
  Tensor gate_product{};
};

/// All arguments are checked before anything is written.
void ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                 const Context& context);
void ffn_backward(const FfnInputs& inputs, const FfnOptions& options, const FfnGradients& gradients,
                  const Context& context);

/// The bytes of workspace that the call needs.
std::size_t ffn_forward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                  const FfnOutputs& outputs, const Context& context);
std::size_t ffn_backward_workspace(const FfnInputs& inputs, const FfnOptions& options,
                                   const FfnGradients& gradients, const Context& context);

Explanation explain_ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                                const Context& context);
Explanation explain_ffn_backward(const FfnInputs& inputs, const FfnOptions& options,
                                 const FfnGradients& gradients, const Context& context);

/// Names of all ffn kernels, fastest first.
std::vector<std::string_view> ffn_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
