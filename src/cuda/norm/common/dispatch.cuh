#pragma once

#include "cuda/norm/common/config.h"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda::norm {

// Types, kinds of norm and shapes of rows become template arguments here.

template <typename Body>
void with_types(const NormProblem& problem, const Body& body) {
  const auto with_norm = [&]<typename T>() {
    problem.norm == Norm::rms ? body.template operator()<T, Norm::rms>()
                              : body.template operator()<T, Norm::layer>();
  };
  with_type(problem.dtype, with_norm);
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
