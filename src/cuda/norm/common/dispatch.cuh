#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/norm/common/config.h"

namespace tilewise::cuda::norm {

// Run-time values become constants here.

template <typename Body>
void with_types(const NormProblem& problem, const Body& body) {
  const auto with_norm = [&]<typename T>() {
    problem.norm == Norm::rms ? body.template operator()<T, Norm::rms>()
                              : body.template operator()<T, Norm::layer>();
  };
  switch (problem.dtype) {
    case DType::f16: return with_norm.template operator()<__half>();
    case DType::bf16: return with_norm.template operator()<__nv_bfloat16>();
    default: return with_norm.template operator()<float>();
  }
}

template <typename Body>
void with_shape(const RowShape& shape, const Body& body) {
  if (shape.one_warp) {
    if (shape.chunks == 1) return body.template operator()<1, true>();
    if (shape.chunks == 2) return body.template operator()<2, true>();
    return body.template operator()<4, true>();
  }
  if (shape.chunks == 2) return body.template operator()<2, false>();
  return body.template operator()<4, false>();
}

}  // namespace tilewise::cuda::norm
