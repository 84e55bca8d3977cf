#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "fuzz/call.h"
#include "fuzz/hostile.h"
#include "support/random.h"

namespace tilewise::fuzz {

/// What a fuzzer's bytes say. The first ones have fixed places, so that a byte that is inserted further on
/// does not move them; the rest is choices of the problem.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t operation() const { return at(0); }
  std::uint64_t seed() const { return at(1) | std::uint64_t{at(2)} << 8; }
  std::uint8_t level() const { return at(3); }
  std::uint8_t order() const { return at(4); }  ///< of tasks, and how many threads they are for
  std::uint8_t checks() const { return at(5); }
  std::size_t mistakes() const { return at(6) % (most_mistakes + 1); }
  std::array<std::uint8_t, mistake_bytes> mistake(std::size_t n) const {
    std::array<std::uint8_t, mistake_bytes> bytes{};
    for (std::size_t i = 0; i < mistake_bytes; ++i) bytes[i] = at(first_mistake + mistake_bytes * n + i);
    return bytes;
  }
  /// What the problem is drawn with.
  test::Random random() const {
    return {bytes_.size() > choices ? bytes_.subspan(choices) : std::span<const std::uint8_t>(), seed()};
  }

 private:
  static constexpr std::size_t most_mistakes = 4;
  static constexpr std::size_t first_mistake = 7;
  static constexpr std::size_t choices = 32;
  std::uint8_t at(std::size_t n) const { return n < bytes_.size() ? bytes_[n] : std::uint8_t{0}; }

  std::span<const std::uint8_t> bytes_;
};

/// Makes the mistakes that the input asks for, makes the call, and aborts where the contract is broken: what
/// is thrown is an Error of the library, and then nothing was written; else nothing but outputs was written,
/// all of them, and with the same bits for other threads, another order of tasks and other contents of the
/// workspace and of what is not read; workspace and explain say what the call does; and what is no mistake is
/// accepted.
void check_call(Call& call, const Input& input);

/// The targets, each a fuzzer of its own.
void fuzz_attention(std::span<const std::uint8_t> bytes);
void fuzz_operations(std::span<const std::uint8_t> bytes);
void fuzz_layer(std::span<const std::uint8_t> bytes);

}  // namespace tilewise::fuzz
