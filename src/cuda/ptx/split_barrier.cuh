#pragma once

#include <cstdint>

namespace tilewise::cuda {

/// A barrier in shared memory at which some threads arrive and go on, and which any may wait for later (sm_80
/// on; before, it does nothing, and __syncthreads has to do). It goes through phases: one ends when all its
/// arrivals have come. Who waits for a phase has not arrived for the next but one.
class SplitBarrier {
 public:
  static constexpr __device__ bool there() {
#if __CUDA_ARCH__ >= 800
    return true;
#else
    return false;
#endif
  }
  /// By one thread, before a barrier of the block.
  __device__ __forceinline__ void init(int arrivals) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
#endif
  }
  /// What the thread wrote before is there for all who have waited.
  __device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "}" ::"r"(address())
        : "memory");
#endif
  }
  /// Until a phase is over, whose number's parity is given: the first is number 0.
  __device__ __forceinline__ void wait(int parity) {
#if __CUDA_ARCH__ >= 800
    std::uint32_t over = 0;
    while (over == 0) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(over)
          : "r"(address()), "r"(parity)
          : "memory");
    }
#endif
  }

 private:
  std::uint64_t state_;

  __device__ __forceinline__ std::uint32_t address() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&state_));
  }
};

}  // namespace tilewise::cuda
