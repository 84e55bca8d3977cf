#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// Where one goes round the places, and the parity of the round; in one register.
template <int stages>
class Ring {
 public:
  __device__ __forceinline__ int stage() const { return stages == 1 ? 0 : static_cast<int>(place_ % 256); }
  __device__ __forceinline__ std::uint32_t parity() const { return place_ / 256; }
  __device__ __forceinline__ void advance() {
    ++place_;
    if (place_ % 256 == stages) place_ = (place_ ^ 256) - stages;
  }

 private:
  std::uint32_t place_ = 0;
};

}  // namespace tilewise::cuda
