#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(default)
namespace tilewise {

/// Element types. f64 is taken by the reference kernel alone; boolean is one byte, zero or not;
/// i64 is the type of dropout's seed.
enum class DType : std::uint8_t { f32, f16, bf16, f64, boolean, i32, i64 };

/// How exact results are. In `standard`, f32 is computed as f32; f16 and bf16 may round what goes into a
/// product to 16 bits, as kernels on tensor cores do. `allow_tf32` lets f32 be as inexact as TF32 products.
/// `strict` has attention of f16 and bf16 as exact as if it were computed in f32 and rounded at the end; for
/// all else it is `standard`.
enum class Precision : std::uint8_t { standard, allow_tf32, strict };

/// Bytes one element takes.
constexpr std::size_t size_of(DType dtype) {
  // Four bits a type, in the order above: kernels ask often, and a shift has no branches.
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
