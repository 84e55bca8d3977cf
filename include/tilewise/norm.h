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

// Norms of rows, with the residual add that stands before them in a transformer layer: s = x + residual, then
//   rms:   y = s · rstd · weight,                  rstd = 1/√(mean(s²) + epsilon)
//   layer: y = (s − mean) · rstd · weight + bias,  rstd = 1/√(variance(s) + epsilon)
// Statistics are of the sum as it is stored, and in f32 (f64 where x is).

enum class Norm : std::uint8_t { rms, layer };

struct NormInputs {
  Tensor x{};         ///< [M, D], by rows
  Tensor residual{};  ///< as x; optional
  Tensor weight{};    ///< [D], type of x or f32; optional: 1
  Tensor bias{};      ///< [D], type of weight; of a layer norm; optional: 0
};

struct NormOptions {
  Norm norm = Norm::rms;
  float epsilon = 1e-5f;
  std::string_view kernel = "auto";
};

struct NormOutputs {
  Tensor y{};     ///< [M, D], by rows, type of x. May be the memory of x where there is no residual.
  Tensor sum{};   ///< x + residual; optional. May be the memory of x or of residual itself.
  Tensor rstd{};  ///< [M], f32 (f64 where x is); optional
  Tensor mean{};  ///< likewise, of a layer norm
};

/// What backward reads, with x in the inputs being the sum that was normalised, and what it writes. Only the
/// gradients given are computed. Those of weight and bias are sums over rows in a fixed order.
struct NormGradients {
  Tensor dy{};
  Tensor d_sum{};  ///< what arrives at the sum from elsewhere, added to dx; optional
  Tensor rstd{};   ///< of forward
  Tensor mean{};   ///< of forward, with a layer norm
  Tensor dx{};     ///< of x and of residual alike. May be the memory of dy or of d_sum.
  Tensor d_weight{};
  Tensor d_bias{};
};

/// Every check is made before anything is written.
void norm_forward(const NormInputs& inputs, const NormOptions& options, const NormOutputs& outputs,
                  const Context& context);
void norm_backward(const NormInputs& inputs, const NormOptions& options, const NormGradients& gradients,
                   const Context& context);

/// Bytes of workspace the call will need.
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
