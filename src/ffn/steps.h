#pragma once

#include <cstddef>
#include <cstdint>

#include "core/matrix.h"
#include "tilewise/activation.h"
#include "tilewise/context.h"

namespace tilewise {

// The steps of the feed-forward network, and of the layer around it, that are not GEMMs. Each type of device
// has one implementation.

/// Computes from the products and the gradient of h, all [M, F], of one type and with contiguous rows:
///   plain: h = f(up), d_up = dh·f'(up)
///   gated: h = f(gate)·up, d_up = dh·f(gate), d_gate = dh·up·f'(gate)
/// Outputs may overwrite inputs, because each element is read before it is written.
struct ActivationPass {
  Activation activation;
  Matrix up;
  Matrix gate;  ///< data is null without a gate
  Matrix dh;    ///< data is null if only h is computed
  Matrix h;
  Matrix d_up, d_gate;
};

struct FfnSteps {
  void (*activation_pass)(const ActivationPass&, const Context&);
  /// sums[n] = Σ_m x[m][n], in a fixed order, added up in f32 and rounded to the type of sums. The context's
  /// workspace holds sum_rows_workspace bytes, aligned to 64.
  void (*sum_rows)(const Matrix& x, const Vector& sums, const Context&);
  std::size_t (*sum_rows_workspace)(const Matrix& x, const Context&);
  /// Rounds an f32 matrix to the type of `to`. Both have contiguous rows.
  void (*round)(const Matrix& from, const Matrix& to, const Context&);
  /// to += x. Both are of one type and have contiguous rows.
  void (*add)(const Matrix& x, const Matrix& to, const Context&);
};

/// The steps of a type of device, or null if it has none.
const FfnSteps* ffn_steps(Device::Type type);

#ifdef TILEWISE_HAS_CUDA
namespace cuda {
extern const FfnSteps ffn_steps;
}
#endif

namespace cpu {
extern const FfnSteps simd_ffn_steps;
}

}  // namespace tilewise
