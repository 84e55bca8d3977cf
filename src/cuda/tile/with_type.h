#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tilewise/dtype.h"

namespace tilewise::cuda {

// Make a run-time type a template argument: they call body.operator()<T>().

template <typename Body>
void with_16_bit_type(DType dtype, const Body& body) {
  dtype == DType::f16 ? body.template operator()<__half>() : body.template operator()<__nv_bfloat16>();
}

template <typename Body>
void with_type(DType dtype, const Body& body) {
  dtype == DType::f16 || dtype == DType::bf16 ? with_16_bit_type(dtype, body)
                                              : body.template operator()<float>();
}

}  // namespace tilewise::cuda
