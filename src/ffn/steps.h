#pragma once

#include <cstddef>
#include <cstdint>

#include "core/matrix.h"
#include "tilewise/activation.h"
#include "tilewise/context.h"

namespace tilewise {

// The parts of the network, and of the layer around it, that are no products; one implementation a device.

/// From the products and the gradient of h, all [M, F] of one type and by rows:
///   plain: h = f(up), d_up = dh·f'(up)
///   gated: h = f(gate)·up, d_up = dh·f(gate), d_gate = dh·up·f'(gate)
/// What is written may stand where something is read: an element is read before it is written.
struct ActivationPass {
  Activation activation;
  Matrix up;
  Matrix gate;  ///< data is null where there is none
  Matrix dh;    ///< data is null where h alone is wanted
  Matrix h;
  Matrix d_up, d_gate;
};

struct FfnSteps {
  void (*activation_pass)(const ActivationPass&, const Context&);
  /// sums[n] = Σ_m x[m][n], in a fixed order, added up in f32 and rounded to the type of sums. The context's
  /// workspace holds sum_rows_workspace bytes, aligned to 64.
  void (*sum_rows)(const Matrix& x, const Vector& sums, const Context&);
  std::size_t (*sum_rows_workspace)(const Matrix& x, const Context&);
  /// Rounds a matrix of f32 to the type of `to`, both by rows.
  void (*round)(const Matrix& from, const Matrix& to, const Context&);
  /// to += x, both of one type and by rows.
  void (*add)(const Matrix& x, const Matrix& to, const Context&);
};

/// Those of a device, or null where it has none: a new device's are declared beside cpu's and returned in
/// steps.cpp, under TILEWISE_HAS_CUDA.
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
