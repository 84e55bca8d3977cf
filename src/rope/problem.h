#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/rope.h"

namespace tilewise {

enum class CacheLayout : std::uint8_t { none, dense, paged };

/// What a rotary embedding computes, apart from how.
struct RopeProblem {
  Device device{};
  DType dtype = DType::f32;
  DType angle_dtype = DType::f32;
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;   ///< 0 without q
  std::int64_t heads_kv = 0;  ///< 0 without k
  std::int64_t length = 0;
  std::int64_t dim = 0;
  std::int64_t rotary_dim = 0;
  std::int64_t dim_v = 0;  ///< 0 without v
  RopePairs pairs = RopePairs::halves;
  bool inverse = false;
  CacheLayout cache = CacheLayout::none;
  bool aligned = false;  ///< rows of all tensors begin at multiples of 16 bytes
  friend bool operator==(const RopeProblem&, const RopeProblem&) = default;
};

/// "rope bf16 B2 Hq32 Hkv8 S4096 D128 R128 on cuda:0, halves, paged cache"
std::string to_string(const RopeProblem& problem);

}  // namespace tilewise
