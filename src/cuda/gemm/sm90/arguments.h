#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/common/order.h"
#include "gemm/call.h"

namespace tilewise::cuda::gemm {

/// What becomes of sums: out = act(a·bᵀ + bias) + residual. Where gated, act(the gate's) · (the others).
struct Epilogue {
  Activation activation = Activation::none;
  Vector bias, gate_bias;  ///< in the type of a or f32
  Matrix residual;         ///< by rows, in the type of out, which it may be; data is null where there is none
  Matrix out;              ///< by rows, in the type of a or f32

  /// Where a call accumulates, out is the residual.
  static Epilogue of(const GemmCall& call) {
    return {.activation = call.problem.activation,
            .bias = call.bias,
            .gate_bias = call.gate_bias,
            .residual = call.problem.accumulate ? call.out : call.residual,
            .out = call.out};
  }
};

/// What the kernel reads, beside the tensors' maps.
struct GemmArguments {
  TileOrder order;
  int m = 0, n = 0, k = 0;
  Epilogue epilogue;
};

/// a, b and the gate's b in boxes of one panel of 64 columns, out, where it is of 16 bits, in those of a
/// slab.
struct GemmMaps {
  CUtensorMap a, b, gate, out;
  CUtensorMap out_rest;  ///< of a tile's last columns, where they are fewer than 64
};

}  // namespace tilewise::cuda::gemm
