#pragma once

#include <cstddef>
#include <cstdint>

namespace tilewise {

/// Hands out pieces of a workspace, each aligned to a cache line. Over a null base it only counts, so the
/// code that lays memory out also tells how much it needs.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(std::int64_t count) {
    used_ = (used_ + alignment - 1) / alignment * alignment;
    auto* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    return piece;
  }

  std::size_t used() const { return used_; }
  /// The same up to where the next piece would begin.
  std::size_t rounded() const { return (used_ + alignment - 1) / alignment * alignment; }

 private:
  static constexpr std::size_t alignment = 64;
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace tilewise
