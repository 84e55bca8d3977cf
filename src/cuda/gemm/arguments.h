#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/order.h"

namespace tilewise::cuda::gemm {

enum class Activation : std::uint8_t { none, gelu_tanh, gelu_erf, relu, silu };

/// A matrix in memory, its rows `stride` elements apart; null where it is not there.
struct Matrix {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  bool aligned = false;  ///< data and rows begin at multiples of 16 bytes
};

/// What becomes of sums: out = act(a b + bias) + residual. Where gated, act(gate) · (the other half).
struct Epilogue {
  Activation activation = Activation::none;
  const std::byte* bias = nullptr;       ///< [n], of out's type
  const std::byte* gate_bias = nullptr;  ///< [n], of the gate
  Matrix residual;                       ///< [m, n]; may be out itself
};

/// What the kernel reads, beside the tensors' maps.
struct GemmArguments {
  TileOrder order;  ///< of clusters, where there are any
  int m = 0, n = 0, k = 0;
  Matrix out;  ///< [m, n]
  Epilogue epilogue;
};

/// a, b and the gate's b in boxes of one panel of 64 columns.
struct GemmMaps {
  CUtensorMap a, b, gate;
};

}  // namespace tilewise::cuda::gemm
