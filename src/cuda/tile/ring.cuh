#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// A position in a ring of stages, and the parity of the current round, in one register. If several threads
/// share the stages round robin, each starts at a stage of its own and advances by `step`.
template <int stages, int step = 1>
class Ring {
  static_assert(step <= stages && stages < 256);

 public:
  Ring() = default;
  __device__ explicit Ring(int first) : place_(static_cast<std::uint32_t>(first)) {}
  __device__ __forceinline__ int stage() const { return stages == 1 ? 0 : static_cast<int>(place_ % 256); }
  __device__ __forceinline__ std::uint32_t parity() const { return place_ / 256; }
  __device__ __forceinline__ void advance() { advance_by(step); }
  /// Advances by a number that divides the number of stages.
  __device__ __forceinline__ void advance_by(int places) {
    place_ += static_cast<std::uint32_t>(places);
    if (place_ % 256 >= stages) place_ = (place_ ^ 256) - stages;
  }

 private:
  std::uint32_t place_ = 0;
};

}  // namespace tilewise::cuda
