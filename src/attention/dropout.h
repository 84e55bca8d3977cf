#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "tilewise/attention.h"

namespace tilewise {

/// The dropout mask of the contract, a function of (seed, offset, b, h, i, j) alone. Eight keys share a draw,
/// philox(counter = {j / 8, i, b·Hq + h, offset low}, key = {seed low, seed high ^ offset high}): the first
/// four have the low halves of its words, the others the high halves. P is kept if its 16 bits are at least
/// the probability · 2^16, and then multiplied by `keep_scale`.
struct DropoutMask {
  PhiloxKey key{};
  std::uint32_t stream = 0;     ///< fourth word of the counter
  std::uint32_t threshold = 0;  ///< probability · 2^16, rounded, in the high half
  float keep_scale = 1;         ///< 1 / (1 - probability as rounded); 0 if everything is dropped
  /// Seed and offset in memory that perhaps only kernels can read. If it is not null, key and stream come
  /// from there.
  const std::int64_t* words = nullptr;

  DropoutMask() = default;
  explicit DropoutMask(const Dropout& dropout) {
    constexpr double unit = 0x1p16;
    const double rounded = std::floor(static_cast<double>(dropout.probability) * unit + 0.5);
    const double number = std::min(rounded, unit - 1);
    threshold = static_cast<std::uint32_t>(number) << 16;
    keep_scale = dropout.probability < 1 ? static_cast<float>(unit / (unit - number)) : 0;
    set(dropout.seed, dropout.offset);
  }

  constexpr void set(std::uint64_t seed, std::uint64_t offset) {
    key = {static_cast<std::uint32_t>(seed),
           static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(offset >> 32)};
    stream = static_cast<std::uint32_t>(offset);
  }

  /// The mask with key and stream read from `words`. For code that can read that memory.
  constexpr DropoutMask drawn() const {
    DropoutMask mask = *this;
    if (words != nullptr)
      mask.set(static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[1]));
    mask.words = nullptr;
    return mask;
  }

  /// The 16 bits of key j, of its word of the draw, in the high half.
  static constexpr std::uint32_t half(std::uint32_t word, std::uint32_t j) {
    return j / 4 % 2 == 0 ? word << 16 : word;
  }
  constexpr bool keeps(std::uint32_t head_index, std::uint32_t i, std::uint32_t j) const {
    return half(philox({j / 8, i, head_index, stream}, key)[j % 4], j) >= threshold;
  }
};

}  // namespace tilewise
