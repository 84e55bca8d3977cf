#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// Where one goes round the places, and the parity of the round; in one register. Those of several that take
/// places in turn begin at different ones and go `step` further.
template <int stages, int step = 1>
class Ring {
  static_assert(step <= stages && stages < 256);

 public:
  Ring() = default;
  __device__ explicit Ring(int first) : place_(static_cast<std::uint32_t>(first)) {}
  __device__ __forceinline__ int stage() const { return stages == 1 ? 0 : static_cast<int>(place_ % 256); }
  __device__ __forceinline__ std::uint32_t parity() const { return place_ / 256; }
  __device__ __forceinline__ void advance() { advance_by(step); }
  /// By places that divide the stages.
  __device__ __forceinline__ void advance_by(int places) {
    place_ += static_cast<std::uint32_t>(places);
    if (place_ % 256 >= stages) place_ = (place_ ^ 256) - stages;
  }

 private:
  std::uint32_t place_ = 0;
};

}  // namespace tilewise::cuda
