#pragma once

#include <cstdint>

#include "core/philox.h"
#include "tilewise/attention.h"

namespace tilewise {

/// The dropout mask of the contract, a function of (seed, offset, b, h, i, j) alone: word j mod 4 of
/// philox(counter = {j / 4, i, b·Hq + h, offset low}, key = {seed low, seed high ^ offset high}); the weight
/// is kept when that word is at least `threshold`, and then multiplied by `keep_scale`.
struct DropoutMask {
  PhiloxKey key{};
  std::uint32_t stream = 0;     ///< fourth word of the counter
  std::uint32_t threshold = 0;  ///< probability · 2^32
  float keep_scale = 1;         ///< 1 / (1 - probability)

  DropoutMask() = default;
  explicit DropoutMask(const Dropout& dropout)
      : key{static_cast<std::uint32_t>(dropout.seed), static_cast<std::uint32_t>(dropout.seed >> 32) ^
                                                          static_cast<std::uint32_t>(dropout.offset >> 32)},
        stream(static_cast<std::uint32_t>(dropout.offset)),
        threshold(static_cast<std::uint32_t>(static_cast<double>(dropout.probability) * 0x1p32)),
        keep_scale(static_cast<float>(1.0 / (1.0 - static_cast<double>(dropout.probability)))) {}

  constexpr bool keeps(std::uint32_t head_index, std::uint32_t i, std::uint32_t j) const {
    return philox({j / 4, i, head_index, stream}, key)[j % 4] >= threshold;
  }
};

}  // namespace tilewise
