#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tilewise/context.h"
#include "tilewise/explain.h"
#include "tilewise/tensor.h"

#pragma GCC visibility push(default)
namespace tilewise {

// Norms of rows, fused with the residual add before them in a transformer layer: s = x + residual, then
//   rms:   y = s · rstd · weight,                  rstd = 1/√(mean(s²) + epsilon)
//   layer: y = (s − mean) · rstd · weight + bias,  rstd = 1/√(variance(s) + epsilon)
// Statistics are those of the rounded sum. They are f32 (f64 if x is).

enum class Norm : std::uint8_t { rms, layer };

struct NormInputs {
  Tensor x{};         ///< [M, D], row-major
  Tensor residual{};  ///< shape and type of x; optional
  Tensor weight{};    ///< [D], type of x or f32; optional, 1 if not given
  Tensor bias{};      ///< [D], type of weight; for layer norms; optional, 0 if not given
};

struct NormOptions {
  Norm norm = Norm::rms;
  float epsilon = 1e-5f;
  std::string_view kernel = "auto";
};

struct NormOutputs {
  Tensor y{};     ///< [M, D], row-major, type of x. Without a residual it may be the same memory as x.
  Tensor sum{};   ///< x + residual; optional. May be the same memory as x or residual.
  Tensor rstd{};  ///< [M], f32 (f64 if x is); optional
  Tensor mean{};  ///< likewise, for layer norms
};

/// What backward reads and what it writes. In the inputs, x is then the sum that was normalised. It computes
/// only the gradients for which tensors are given. Those of weight and bias are summed over rows in a fixed
/// order.
struct NormGradients {
  Tensor dy{};
  Tensor d_sum{};  ///< gradient of the sum from other uses of it, which is added to dx; optional
  Tensor rstd{};   ///< of forward
  Tensor mean{};   ///< of forward, for layer norms
  Tensor dx{};     ///< gradient of x and of residual. May be the same memory as dy or d_sum.
  Tensor d_weight{};
  Tensor d_bias{};
};

/// All arguments are checked before anything is written.
void norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                  const Context& context);
void norm_backward(const NormInputs& inputs, const NormOptions& options, const NormGradients& gradients,
                   const Context& context);

/// The bytes of workspace that the call needs.
std::size_t norm_forward_workspace(const NormInputs& inputs, const NormOptions& options,
                                   const NormOutputs& outputs, const Context& context);
std::size_t norm_backward_workspace(const NormInputs& inputs, const NormOptions& options,
                                    const NormGradients& gradients, const Context& context);

Explanation explain_norm_forward(const NormInputs& inputs, const NormOptions& options,
                                 const NormOutputs& outputs, const Context& context);
Explanation explain_norm_backward(const NormInputs& inputs, const NormOptions& options,
                                  const NormGradients& gradients, const Context& context);

/// Names of all norm kernels, fastest first.
std::vector<std::string_view> norm_kernels();

}  // namespace tilewise
#pragma GCC visibility pop
