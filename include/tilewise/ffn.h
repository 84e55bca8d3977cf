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
// Tokens are taken in chunks, so that h, which is the large one, never exceeds a bound.

struct FfnInputs {
  Tensor x{};          ///< [M, E], by rows
  Tensor up{};         ///< [F, E]
  Tensor gate{};       ///< [F, E]; optional
  Tensor down{};       ///< [O, F]; O is E in all common models
  Tensor up_bias{};    ///< [F]; biases are optional, in the type of x or f32
  Tensor gate_bias{};  ///< [F]
  Tensor down_bias{};  ///< [O]
  Tensor residual{};   ///< [M, O], by rows; optional. May be the memory of out itself.
};

struct FfnOptions {
  Activation activation = Activation::gelu;
  /// Upper bound on the bytes of the intermediate results, rounded up to what one token takes (in backward:
  /// 64 hidden features of all tokens); 0: as much as runs best. In forward on a GPU it also bounds the split
  /// copies that products of f32 keep of their weights, down to those of 128 columns. Results do not depend
  /// on it, but for the rounding of sums over tokens in the gradients of weights, and of split products.
  std::size_t max_intermediate_bytes = 0;
  Precision precision = Precision::standard;
  std::string_view kernel = "auto";
};

struct FfnOutputs {
  Tensor out{};  ///< [M, O], by rows
  /// x·upᵀ + up_bias and, of a gated network, x·gateᵀ + gate_bias, rounded: what backward needs of forward.
  /// [M, F], by rows; optional, both or none. max_intermediate_bytes does not bound them.
  Tensor up_product{};
  Tensor gate_product{};
};

/// What backward reads (d_out and the products) and what it writes. Only the gradients given are computed;
/// that of the residual is d_out itself.
struct FfnGradients {
  Tensor d_out{};  ///< [M, O], by rows
  Tensor dx{};     ///< the others have the shapes and types of what they are gradients of
  Tensor d_up{};
  Tensor d_gate{};
  Tensor d_down{};
  Tensor d_up_bias{};
  Tensor d_gate_bias{};
  Tensor d_down_bias{};
  Tensor up_product{};  ///< as forward left them; without them they are computed anew from x
  Tensor gate_product{};
};

/// Every check is made before anything is written.
void ffn_forward(const FfnInputs& inputs, const FfnOptions& options, const FfnOutputs& outputs,
                 const Context& context);
void ffn_backward(const FfnInputs& inputs, const FfnOptions& options, const FfnGradients& gradients,
                  const Context& context);

/// Bytes of workspace the call will need.
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
