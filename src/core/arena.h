#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace tilewise {

/// Throws InvalidArgument: the workspace would have 2^63 bytes or more.
[[noreturn]] void reject_workspace_size();

/// Allocates arrays in a workspace, each aligned to a cache line. With a null base it only counts bytes, so
/// that the code that lays out the workspace also computes its size.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}

  /// Allocates an array whose number of elements is the product of the factors, none of which may be
  /// negative.
  template <typename T, typename... Factors>
  T* take(Factors... factors) {
    std::int64_t bytes = sizeof(T);
    const bool fits = (!__builtin_mul_overflow(bytes, static_cast<std::int64_t>(factors), &bytes) && ...);
    const std::size_t first = rounded();
    if (!fits || static_cast<std::size_t>(bytes) > most - first) reject_workspace_size();
    used_ = first + static_cast<std::size_t>(bytes);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + first);
  }

  std::size_t used() const { return used_; }
  /// The same, rounded up to the beginning of the next array.
  std::size_t rounded() const { return (used_ + alignment - 1) / alignment * alignment; }

 private:
  static constexpr std::size_t alignment = 64;
  // Rounding this number up does not overflow.
  static constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max() - alignment;
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace tilewise
