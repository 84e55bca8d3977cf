#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/check.h"
#include "tilewise/activation.h"
#include "tilewise/context.h"

namespace tilewise {

// Checks that several operations share.

using Shape = std::initializer_list<std::int64_t>;

inline std::string text_of(Shape shape) {
  return shape_string(
      Tensor(nullptr, DType::f32, std::span<const std::int64_t>(shape.begin(), shape.size())));
}

inline bool has_shape(const Tensor& tensor, Shape shape) {
  return tensor.rank == static_cast<int>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape.begin());
}

/// Whether two tensors have the same rank and extents.
inline bool same_shape(const Tensor& a, const Tensor& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin());
}

/// Checks that the tensor is a valid view, as tensor.h describes it, on the context's device.
void check_memory(const Tensor& tensor, std::string_view name, const Context& context);

/// Checks that a value is one of its enumeration, whose values are 0 to `last`.
template <typename Enum>
void check_enumerator(Enum value, Enum last, std::string_view name, std::string_view known) {
  check(value <= last, name, known, [&] { return std::to_string(static_cast<int>(value)); });
}
inline void check_precision(Precision precision) {
  check_enumerator(precision, Precision::strict, "precision", "standard, allow_tf32 or strict");
}
inline void check_activation(Activation activation, std::string_view name = "activation") {
  check_enumerator(activation, Activation::silu, name, "none, relu, gelu, gelu_tanh or silu");
}

inline void check_shape(const Tensor& tensor, std::string_view name, Shape shape, std::string_view meaning,
                        const Context& context) {
  check(
      has_shape(tensor, shape), name, [&] { return std::string(meaning) + " = " + text_of(shape); }, tensor);
  check_memory(tensor, name, context);
}

inline void check_contiguous_last(const Tensor& tensor, std::string_view name) {
  const int last = tensor.rank - 1;
  check(tensor.extent(last) <= 1 || tensor.stride(last) == 1, name, "a contiguous last dimension",
        [&] { return "stride " + std::to_string(tensor.stride(last)); });
}

inline void check_dtype(const Tensor& tensor, std::string_view name, DType expected) {
  check(tensor.dtype == expected, name, to_string(expected), to_string(tensor.dtype));
}

// Checks that the type is f32; f64 is allowed, too, if the inputs are f64.
inline void check_statistics_dtype(const Tensor& tensor, std::string_view name, DType inputs) {
  check_dtype(tensor, name, inputs == DType::f64 && tensor.dtype == DType::f64 ? DType::f64 : DType::f32);
}

/// Whether both are given and name the same elements in the same order, as for an operation in place.
bool same_view(const Tensor& a, const Tensor& b);

/// Whether all rows begin at multiples of 16 bytes and no stride is negative.
bool has_aligned_rows(const Tensor& tensor);
/// Whether the rows would start at such multiples if every extent were above 1.
bool has_aligned_strides(const Tensor& tensor);

/// Checks device, threads and SIMD level.
void check_context(const Context& context);

struct Named {
  std::string_view name;
  const Tensor* tensor;
};

/// Checks that tensors can replace those with which a plan was made: the same ones are given, with the same
/// types, shapes and strides, at addresses that are multiples of 2, 4, 8 or 16 where the planned ones are.
/// Both lists must name the same arguments in the same order.
void check_same_forms(std::span<const Named> planned, std::span<const Named> given);

/// Checks that no written tensor overlaps itself, a tensor that is read, or another written one. Tensors that
/// are not given are ignored.
void check_written(std::span<const Named> written, std::span<const Named> read);
inline void check_written(std::initializer_list<Named> written, std::initializer_list<Named> read) {
  check_written(std::span(written.begin(), written.size()), std::span(read.begin(), read.size()));
}

}  // namespace tilewise
