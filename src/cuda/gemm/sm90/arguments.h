#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/common/order.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

/// The epilogue: out = act(A·Bᵀ + bias) + residual. If gated, out = act(A·gateᵀ + gate_bias) · (A·Bᵀ + bias)
/// + residual.
struct Epilogue {
  Activation activation = Activation::none;
  Vector bias, gate_bias;  ///< in the type of A or f32
  Matrix residual;  ///< row-major, in the type of out; may be out itself; data is null if there is none
  Matrix out;       ///< row-major, in the type of A or f32

  /// If the call accumulates, out is the residual.
  static Epilogue of(const GemmCall& call) {
    return {.activation = call.problem.activation,
            .bias = call.bias,
            .gate_bias = call.gate_bias,
            .residual = call.problem.accumulate ? call.out : call.residual,
            .out = call.out};
  }
};

/// The kernel's parameters, beside the tensor maps.
struct GemmArguments {
  TileOrder order;
  int m = 0, n = 0, k = 0;
  Epilogue epilogue;
};

/// Tensor maps of A, B and the gate's weights, with boxes of one panel of 64 columns; and of out, if it has
/// 16-bit elements, with boxes of an epilogue slab.
struct GemmMaps {
  CUtensorMap a, b, gate, out;
  CUtensorMap out_tail;  ///< for a tile's last columns, if they are fewer than 64
};

}  // namespace tilewise::cuda::gemm
