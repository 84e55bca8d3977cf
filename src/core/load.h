#pragma once

#include <cstddef>
#include <cstdint>

#include "tilewise/dtype.h"
#include "tilewise/half.h"

namespace tilewise {

/// Element `index` of an array of a run-time type, as f64. For code where speed does not matter.
inline double load_element(const std::byte* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64: return reinterpret_cast<const double*>(data)[index];
    case DType::f32: return static_cast<double>(reinterpret_cast<const float*>(data)[index]);
    case DType::f16:
      return static_cast<double>(f16_to_float(reinterpret_cast<const std::uint16_t*>(data)[index]));
    case DType::bf16:
      return static_cast<double>(bf16_to_float(reinterpret_cast<const std::uint16_t*>(data)[index]));
    case DType::boolean: return data[index] != std::byte{0} ? 1.0 : 0.0;
    case DType::i32: return static_cast<double>(reinterpret_cast<const std::int32_t*>(data)[index]);
    case DType::i64: return static_cast<double>(reinterpret_cast<const std::int64_t*>(data)[index]);
  }
  return 0;
}

/// Stores a value as an element of a floating type, rounded.
inline void store_element(std::byte* data, DType dtype, std::int64_t index, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::f64: reinterpret_cast<double*>(data)[index] = value; break;
    case DType::f32: reinterpret_cast<float*>(data)[index] = narrow; break;
    case DType::f16: reinterpret_cast<std::uint16_t*>(data)[index] = float_to_f16(narrow); break;
    case DType::bf16: reinterpret_cast<std::uint16_t*>(data)[index] = float_to_bf16(narrow); break;
    case DType::boolean:
    case DType::i32:
    case DType::i64: break;
  }
}

}  // namespace tilewise
