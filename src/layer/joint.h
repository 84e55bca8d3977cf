#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tilewise/tensor.h"

namespace tilewise {

// Views that treat the weights (or results) of q, k and v as one matrix, so that one GEMM computes all three.

/// `count` columns of a matrix from `first` on.
inline Tensor columns_of(const Tensor& matrix, std::int64_t first, std::int64_t count) {
  auto* data =
      static_cast<std::byte*>(matrix.data) + first * static_cast<std::int64_t>(size_of(matrix.dtype));
  return Tensor(data, matrix.dtype, std::array{matrix.extent(0), count},
                std::array{matrix.stride(0), std::int64_t{1}}, matrix.device);
}

/// Three tensors that follow each other in memory along `dim` as one tensor; not given if they do not.
inline Tensor joint(int dim, const Tensor& a, const Tensor& b, const Tensor& c) {
  Tensor whole = a;
  for (const Tensor* next : {&b, &c}) {
    if (!next->given() || !whole.given() || next->rank != whole.rank || next->dtype != whole.dtype) return {};
    for (int d = 0; d < whole.rank; ++d) {
      if (next->stride(d) != whole.stride(d)) return {};
    }
    const std::int64_t elements = whole.extent(dim) * whole.stride(dim);
    if (next->data !=
        static_cast<std::byte*>(whole.data) + elements * static_cast<std::int64_t>(size_of(whole.dtype))) {
      return {};
    }
    whole.shape[static_cast<std::size_t>(dim)] += next->extent(dim);
  }
  return whole;
}

}  // namespace tilewise
