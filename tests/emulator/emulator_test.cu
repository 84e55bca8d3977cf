// What the emulator has to find: kernels that are wrong in ways a GPU may or may not show.

#include <gtest/gtest.h>

#include <string>

#include "cuda/device_tensors.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::test::emulator_test {
namespace {

using namespace cuda;

/// What the next call says of a kernel.
template <auto kernel, typename... Arguments>
std::string fault_of(unsigned threads, const Arguments&... arguments) {
  launch<kernel>(
      {.name = "a kernel", .blocks = 1, .threads = static_cast<int>(threads), .shared_bytes = 4096},
      arguments...);
  if (cudaDeviceSynchronize() == cudaSuccess) return "";
  const std::string fault = cudaGetErrorString(cudaErrorLaunchFailure);
  EXPECT_THROW(launch<kernel>({.name = "the next", .blocks = 1, .threads = 32}, arguments...), DeviceError);
  cudaGetLastError();
  return fault;
}

__global__ void half_wait() {
  if (threadIdx.x < 32) sync_some<1, 64>();
}
TEST(Emulator, SaysWhereThreadsWaitForEver) {
  const std::string fault = fault_of<half_wait>(64);
  EXPECT_NE(fault.find("32 threads (0 to 31) at barrier 1"), std::string::npos) << fault;
}

__global__ void read_behind() {
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 16);
  load_pinned_4(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)) + 4096);
}
TEST(Emulator, FindsAddressesOutsideSharedMemory) {
  const std::string fault = fault_of<read_behind>(1);
  EXPECT_NE(fault.find("outside the block's shared memory"), std::string::npos) << fault;
}

__global__ void arrive_twice() {
  TILEWISE_DYNAMIC_SHARED(Mbarrier, barrier, 16);
  init_barrier(barrier, 2);
  arrive_expecting(barrier, 16);
  arrive(barrier);
  arrive(barrier);
}
TEST(Emulator, FindsArrivalsThatAnMbarrierWasNotMadeFor) {
  const std::string fault = fault_of<arrive_twice>(1);
  EXPECT_NE(fault.find("more arrivals at an mbarrier"), std::string::npos) << fault;
}

__global__ void wait_for_bytes(const std::byte* from, int announced) {
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 16);
  auto* barrier = reinterpret_cast<Mbarrier*>(shared);
  init_barrier(barrier, 1);
  arrive_expecting(barrier, announced);
  copy_bytes(shared + 64, from, 64, barrier);
  wait(barrier, 0);
}
TEST(Emulator, WaitsForAllBytesThatWereAnnounced) {
  const DeviceMemory from(64);
  from.fill(0);
  EXPECT_EQ(fault_of<wait_for_bytes>(1, from.data(), 64), "");
  const std::string fault = fault_of<wait_for_bytes>(1, from.data(), 80);
  EXPECT_NE(fault.find("at the mbarrier"), std::string::npos) << fault;
}

template <int kept, int taken>
__global__ void share_registers() {
  if (threadIdx.x < 128) {
    keep_registers<kept>();
  } else {
    take_registers<taken>();
  }
}
TEST(Emulator, FindsRegistersThatNobodyGivesBack) {
  EXPECT_EQ((fault_of<share_registers<24, 240>>(384)), "");
  const std::string fault = fault_of<share_registers<32, 240>>(384);
  EXPECT_NE(fault.find("at setmaxnreg"), std::string::npos) << fault;
}

template <bool waits>
__global__ void copy_and_read(const float* from, float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  copy_async_16(shared, from, true);
  commit_copies();
  if (waits) wait_copies<0>();
  *to = shared[0];
}
TEST(Emulator, DoesCopiesLateWhereNobodyWaits) {
  const DeviceMemory from(16), to(4);
  from.fill(0);
  const auto result = [&](bool waits) {
    waits ? fault_of<copy_and_read<true>>(1, reinterpret_cast<const float*>(from.data()),
                                          reinterpret_cast<float*>(to.data()))
          : fault_of<copy_and_read<false>>(1, reinterpret_cast<const float*>(from.data()),
                                           reinterpret_cast<float*>(to.data()));
    return *reinterpret_cast<const float*>(to.data());
  };
  emulator::set_late(true);
  EXPECT_EQ(result(true), 0.0f);
  EXPECT_TRUE(std::isnan(result(false)));
  emulator::set_late(false);
  EXPECT_EQ(result(false), 0.0f);
}

}  // namespace
}  // namespace tilewise::test::emulator_test
