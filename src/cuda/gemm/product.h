#pragma once

#include <cstdint>

#include "cuda/gemm/arguments.h"
#include "tilewise/dtype.h"

namespace tilewise::cuda::gemm {

/// A factor: its rows lie `stride` elements apart.
struct Operand {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

/// out [m, n] = epilogue(a · bᵀ), a [m, k] and b [n, k], or [k, m] and [k, n] where turned.
struct Product {
  DType dtype = DType::bf16;
  std::int64_t m = 0, n = 0, k = 0;
  Operand a, b;
  Operand gate;  ///< like b, where the result is act(a · gateᵀ) · (a · bᵀ)
  bool turned_a = false, turned_b = false;
  Matrix out;
  Epilogue epilogue;
};

}  // namespace tilewise::cuda::gemm
