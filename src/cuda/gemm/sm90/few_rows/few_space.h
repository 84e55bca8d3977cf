#pragma once

#include <cstdint>

#include "core/arena.h"

namespace tilewise::cuda::gemm {

/// What blocks of a product with few rows leave to each other.
struct FewSpace {
  float* partials;       ///< [multiprocessors][128 x tokens]
  std::uint32_t* flags;  ///< [multiprocessors][2]: of each warpgroup
};

/// Tokens are filled up to a power of two.
inline FewSpace take_few_space(Arena& arena, std::int64_t rows, int multiprocessors) {
  std::int64_t tokens = 8;
  while (tokens < rows) tokens *= 2;
  return {arena.take<float>(multiprocessors * 128 * tokens),
          arena.take<std::uint32_t>(std::int64_t{multiprocessors} * 2)};
}

}  // namespace tilewise::cuda::gemm
