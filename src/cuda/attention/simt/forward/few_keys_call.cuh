#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/rows.h"

namespace tilewise::cuda::simt::few_keys {

// What the kernel for few keys (fused_short.cu) is given.

/// Rows of an entry and head. Those of a block are reached by one instruction each: a 32-bit product on top
/// of a 64-bit address.
struct ShortRows {
  float* data;
  std::int64_t stride_b, stride_h;
  int stride_bytes;  // from a row to the next

  static ShortRows of(const Rows& rows) {
    return {rows.wanted ? reinterpret_cast<float*>(rows.data) : nullptr, rows.stride_b, rows.stride_h,
            static_cast<int>(rows.stride_s * static_cast<std::int64_t>(sizeof(float)))};
  }
  /// Whether 32 bits are enough for that stride.
  static bool holds(const Rows& rows) { return std::abs(rows.stride_s) < (1 << 28); }
  __device__ float* first(std::uint32_t b, std::uint32_t h, int row) const {
    return at(data + b * stride_b + h * stride_h, row);
  }
  __device__ float* at(float* first, int row) const { return row_at(first, row, stride_bytes); }
  __device__ static float* row_at(float* first, int row, int stride_bytes) {
    return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(first) +
                                    static_cast<std::int64_t>(row) * stride_bytes);
  }
};

/// Divides what is far below 2^16 by what is, too, with a product for a division.
struct Divisor {
  std::uint32_t value, inverse;  // 2^31 / value, rounded up

  static Divisor of(std::int64_t value) {
    return {static_cast<std::uint32_t>(value),
            static_cast<std::uint32_t>(((std::int64_t{1} << 31) + value - 1) / value)};
  }
  __device__ std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * inverse) >> 31);
  }
};

/// A call in as few numbers as it takes: the constant cache is cold when a kernel begins, and each line
/// waits.
struct ShortCall {
  ShortRows q, k, v, o, lse;
  Divisor heads, heads_together;
  int length_q, length_k, dim_qk, dim_v;
  int left, right;    // query i sees keys i − left up to i + right
  float scale, unit;  // of products, in natural units and for exp2; both positive
  bool negative;      // the scale, so that products are negated
};

}  // namespace tilewise::cuda::simt::few_keys
