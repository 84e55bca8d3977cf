#pragma once

#include <cstdint>

#include "core/philox.h"
#include "tilewise/attention.h"

namespace tilewise {

/// The dropout mask of the contract, a function of (seed, offset, b, h, i, j) alone: word j mod 4 of
/// philox(counter = {j / 4, i, b·Hq + h, offset low}, key = {seed low, seed high ^ offset high}). P is kept
/// if that word is at least `threshold`, and then multiplied by `keep_scale`.
struct DropoutMask {
  PhiloxKey key{};
  std::uint32_t stream = 0;     ///< fourth word of the counter
  std::uint32_t threshold = 0;  ///< probability · 2^32
  float keep_scale = 1;         ///< 1 / (1 - probability); 0 if everything is dropped
  /// Seed and offset in memory that perhaps only kernels can read. If it is not null, key and stream come
  /// from there.
  const std::int64_t* words = nullptr;

  DropoutMask() = default;
  explicit DropoutMask(const Dropout& dropout)
      : threshold(dropout.probability < 1
                      ? static_cast<std::uint32_t>(static_cast<double>(dropout.probability) * 0x1p32)
                      : ~std::uint32_t{0}),
        keep_scale(dropout.probability < 1
                       ? static_cast<float>(1.0 / (1.0 - static_cast<double>(dropout.probability)))
                       : 0) {
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

  constexpr bool keeps(std::uint32_t head_index, std::uint32_t i, std::uint32_t j) const {
    return philox({j / 4, i, head_index, stream}, key)[j % 4] >= threshold;
  }
};

}  // namespace tilewise
