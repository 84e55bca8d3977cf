#pragma once

#include <cstdint>
#include <limits>

#include "tilewise/tensor.h"

namespace tilewise {

/// The product of two sizes, or the largest std::int64_t if it does not fit.
constexpr std::int64_t bounded_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

/// Whether the tensor has no elements.
inline bool is_empty(const Tensor& tensor) {
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.extent(dim) == 0) return true;
  }
  return false;
}

}  // namespace tilewise
