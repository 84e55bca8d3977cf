#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "tilewise/dtype.h"
#include "tilewise/half.h"

#pragma GCC visibility push(default)
namespace tilewise {

/// The device to which memory belongs.
struct Device {
  enum class Type : std::uint8_t { cpu, cuda };
  Type type = Type::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

std::string to_string(Device device);

template <typename T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<bool> {
  static constexpr DType value = DType::boolean;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::i64;
};

/// A view: it owns no memory and copies nothing. Strides count elements. A default-constructed Tensor (rank
/// 0) means "not given". Every call checks its tensors: at most `max_rank` dimensions, no negative extent,
/// data at a multiple of the element's size, and fewer than 2^56 bytes, both in its elements and from its
/// first address to its last. For that limit, an extent of 0 counts as 1.
struct Tensor {
  static constexpr int max_rank = 5;
  using Extents = std::array<std::int64_t, max_rank>;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int rank = 0;
  Extents shape{};
  Extents strides{};

  Tensor() = default;
  /// A row-major view.
  Tensor(void* data, DType dtype, std::span<const std::int64_t> shape, Device device = {});
  /// A view with the given strides.
  Tensor(void* data, DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
         Device device = {});

  /// A row-major view of CPU memory: `Tensor::of(pointer, {batch, heads, length, dim})`.
  template <typename T>
  static Tensor of(T* data, std::initializer_list<std::int64_t> shape) {
    using Element = std::remove_const_t<T>;
    return Tensor(const_cast<Element*>(data), dtype_of<Element>::value,
                  std::span<const std::int64_t>(shape.begin(), shape.size()));
  }

  bool given() const { return rank != 0; }
  /// The number of elements, or the largest std::int64_t if there are more.
  std::int64_t size() const;
  std::int64_t extent(int dim) const { return shape[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return strides[static_cast<std::size_t>(dim)]; }
};

/// "[2, 8, 128, 64]"
std::string shape_string(const Tensor& tensor);
/// "f32[2, 8, 128, 64]"
std::string to_string(const Tensor& tensor);

}  // namespace tilewise
#pragma GCC visibility pop
