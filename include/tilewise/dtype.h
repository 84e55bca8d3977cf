#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(default)
namespace tilewise {

/// Element types. Only the reference kernels take f64. A boolean is one byte, and true if it is not zero. i64
/// is the type of positions and of dropout's seed.
enum class DType : std::uint8_t { f32, f16, bf16, f64, boolean, i32, i64 };

/// How exact results must be. `standard`: f32 is computed in f32; for f16 and bf16 the operands of products
/// may be rounded to 16 bits, as on tensor cores. `allow_tf32`: f32 results may be as inexact as TF32
/// products. `strict`: attention in f16 and bf16 is as exact as if it were computed in f32 and rounded at the
/// end; other operations treat it as `standard`.
enum class Precision : std::uint8_t { standard, allow_tf32, strict };

/// The bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  // Four bits per type, in the order above. Kernels call this often, and a shift has no branches.
  constexpr std::uint32_t sizes = 0x8418224;
  return sizes >> (4 * static_cast<unsigned>(dtype)) & 15;
}
static_assert(size_of(DType::f32) == 4 && size_of(DType::f16) == 2 && size_of(DType::bf16) == 2 &&
              size_of(DType::f64) == 8 && size_of(DType::boolean) == 1 && size_of(DType::i32) == 4 &&
              size_of(DType::i64) == 8);

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

constexpr std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::boolean: return "boolean";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "unknown";
}

}  // namespace tilewise
#pragma GCC visibility pop
