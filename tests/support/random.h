#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <utility>

namespace tilewise::test {

/// Random numbers that are the same on every machine and with every standard library: SplitMix64 (Steele, Lea
/// and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// For fuzzers: each choice takes two of the fuzzer's bytes. After the last byte, choices come from the
  /// seed. Noise always comes from the seed.
  Random(std::span<const std::uint8_t> choices, std::uint64_t seed) : state_(seed), choices_(choices) {}

  std::uint64_t bits() {
    if (choices_.size() < 2) return noise_bits();
    const std::uint64_t choice = choices_[0] | std::uint64_t{choices_[1]} << 8;
    choices_ = choices_.subspan(2);
    return choice * 0x0001000100010001u;  // in all bits, since callers use upper or lower ones
  }
  std::uint64_t noise_bits() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// A number in [0, 1).
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  /// The same for the values of tensors, which are not choices of a fuzzer.
  double noise() { return static_cast<double>(noise_bits() >> 11) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * unit(); }
  /// A number from low to high, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return unit() < probability; }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - noise()));
    return radius * std::cos(6.283185307179586 * noise());
  }
  /// A number between the two, with a uniform distribution of its logarithm.
  double log_uniform(double low, double high) { return std::exp(uniform(std::log(low), std::log(high))); }

  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<std::int64_t>(choices.size()) - 1)];
  }
  template <typename Range>
  void shuffle(Range& range) {
    for (auto n = static_cast<std::int64_t>(std::size(range)) - 1; n > 0; --n) {
      std::swap(range[static_cast<std::size_t>(n)], range[static_cast<std::size_t>(between(0, n))]);
    }
  }

 private:
  std::uint64_t state_;
  std::span<const std::uint8_t> choices_;
};

}  // namespace tilewise::test
