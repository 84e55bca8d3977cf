#pragma once

#include <cstdint>

namespace tilewise::cuda::gemm {

/// Several GEMMs of one shape: where the matrices of the next one are.
struct Items {
  std::int64_t count = 1;
  std::int64_t a = 0, b = 0;  ///< elements from one matrix to the next
  std::int64_t out_rows = 0;  ///< rows from one result to the next
};

}  // namespace tilewise::cuda::gemm
