// What the emulator has to find: kernels that are wrong in ways a GPU may or may not show.

#include <gtest/gtest.h>

#include <string>

#include "cuda/device_tensors.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
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
  fence_barrier_inits();
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

__global__ void copy_byte(const std::byte* from, std::byte* to) { *to = *from; }
TEST(Emulator, ForbidsReadsBehindMemoryUnderAddressSanitizer) {
#ifdef TILEWISE_FORBIDS
  const DeviceMemory from(60), to(1);
  from.fill(0);
  EXPECT_EQ(fault_of<copy_byte>(1, from.data() + 59, to.data()), "");
  EXPECT_DEATH(fault_of<copy_byte>(1, from.data() + 60, to.data()), "AddressSanitizer");
  EXPECT_DEATH(fault_of<wait_for_bytes>(1, from.data(), 64), "AddressSanitizer");  // a bulk copy of 64 bytes
#else
  GTEST_SKIP() << "built without AddressSanitizer";
#endif
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

// Races: what a kernel gives with the one thing that puts its accesses in order, and without it.

template <bool in_order>
__global__ void write_and_read(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (in_order) __syncthreads();
  to[threadIdx.x] = shared[(threadIdx.x + 32) % blockDim.x];
}
template <bool in_order>
__global__ void write_and_shuffle(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (in_order) __syncwarp();
  const int from = __shfl_sync(~0u, static_cast<int>(threadIdx.x ^ 1), static_cast<int>(threadIdx.x));
  to[threadIdx.x] = shared[from];  // a shuffle puts nothing in order
}
template <bool in_order>
__global__ void write_behind_readers(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  const float read = shared[(threadIdx.x + 32) % blockDim.x];
  if (in_order) __syncthreads();
  shared[threadIdx.x] = -1;
  to[threadIdx.x] = read;
}
template <bool in_order>
__global__ void copy_async_for_others(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  copy_async_16(shared + 4 * threadIdx.x, to + 4 * threadIdx.x, true);
  commit_copies();
  if (in_order) wait_copies<0>();
  __syncthreads();
  to[threadIdx.x] = shared[(threadIdx.x + 32) % blockDim.x];
}
template <bool in_order>
__global__ void bulk_add(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  shared[threadIdx.x] = 1;
  if (in_order) fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) add_floats(to, shared, 256);
  commit_stores();
  wait_stores();
}
template <bool in_order>
__global__ void reuse_after_bulk_add(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  shared[threadIdx.x] = 1;
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    add_floats(to, shared, 256);
    commit_stores();
    if (in_order) wait_stores_read();
  }
  __syncthreads();
  shared[threadIdx.x] = 2;
}
template <bool in_order>
__global__ void bulk_copy(float* to) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  auto* barrier = reinterpret_cast<Mbarrier*>(shared + 512);
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    fence_barrier_inits();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(barrier, 256);
    copy_bytes(shared, to, 256, barrier);
  }
  if (in_order || threadIdx.x < 32) wait(barrier, 0);
  to[256 + threadIdx.x] = shared[threadIdx.x];
}
// A product of what all four warps wrote, which is then written again.
enum class Without { nothing, barrier_before, fence, barrier_after };
template <Without left_out>
__global__ void product_of_rows(float* to) {
  TILEWISE_DYNAMIC_SHARED(std::uint32_t, shared, 1024);
  for (int n = 0; n < 8; ++n) shared[threadIdx.x + 128 * n] = 0x3C003C00u;
  if (left_out != Without::fence) fence_async_proxy();
  if (left_out != Without::barrier_before) sync_some<1, 128>();  // else a warp sees its own rows alone
  float c[4] = {};
  const auto tile = describe_tile(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)), 1024);
  const std::uint32_t a[4] = {};
  fence_products();
  WarpgroupProduct<__half, 8>::from_registers<0>(c, a, tile, false);
  commit_products();
  wait_products<0>();
  if (left_out != Without::barrier_after) sync_some<1, 128>();  // else another warp's product may still read
  shared[threadIdx.x] = 0;
  to[threadIdx.x] = c[0];
}
template <bool in_order>
__global__ void tell_other_block(float* to) {
  auto* flag = reinterpret_cast<std::uint32_t*>(to + 1);
  if (blockIdx.x == 0) {
    *to = 1;
    in_order ? raise_flag(flag, 1) : static_cast<void>(atomicExch(flag, 1u));
  } else {
    await_flag(flag, 1);
    *to = *to + 1;
  }
}

#ifdef TILEWISE_EMULATOR_RACES
template <auto right, auto wrong>
void expect_race(unsigned threads, const std::string& what, int blocks = 1) {
  const DeviceMemory memory(4096);
  const auto fault = [&]<auto kernel>() {
    memory.fill(0);
    launch<kernel>(
        {.name = "a kernel", .blocks = blocks, .threads = static_cast<int>(threads), .shared_bytes = 4096},
        reinterpret_cast<float*>(memory.data()));
    if (cudaDeviceSynchronize() == cudaSuccess) return std::string();
    std::string text = cudaGetErrorString(cudaErrorLaunchFailure);
    EXPECT_THROW(launch<kernel>({.name = "the next", .blocks = 1, .threads = 32},
                                reinterpret_cast<float*>(memory.data())),
                 DeviceError);
    cudaGetLastError();
    return text;
  };
  EXPECT_EQ(fault.template operator()<right>(), "");
  const std::string text = fault.template operator()<wrong>();
  EXPECT_NE(text.find("race"), std::string::npos) << text;
  EXPECT_NE(text.find(what), std::string::npos) << text;
}
#define EXPECT_RACE(kernel, ...) (expect_race<kernel<true>, kernel<false>>(__VA_ARGS__))
#define EXPECT_PRODUCT_RACE(left_out, what) \
  (expect_race<product_of_rows<Without::nothing>, product_of_rows<Without::left_out>>(128, what))
#else
#define EXPECT_RACE(kernel, ...) GTEST_SKIP() << "built without TILEWISE_EMULATOR_RACES"
#define EXPECT_PRODUCT_RACE(left_out, what) EXPECT_RACE()
#endif

TEST(EmulatorRaces, BetweenThreads) { EXPECT_RACE(write_and_read, 64, "shared memory"); }
TEST(EmulatorRaces, BetweenLanes) { EXPECT_RACE(write_and_shuffle, 32, "shared memory"); }
TEST(EmulatorRaces, WithReaders) { EXPECT_RACE(write_behind_readers, 64, "shared memory"); }
TEST(EmulatorRaces, WithAsyncCopies) { EXPECT_RACE(copy_async_for_others, 64, "before a wait for it"); }
TEST(EmulatorRaces, WithBulkAdds) { EXPECT_RACE(bulk_add, 64, "without the async proxy's fence"); }
TEST(EmulatorRaces, BehindBulkAdds) { EXPECT_RACE(reuse_after_bulk_add, 64, "before a wait for it"); }
TEST(EmulatorRaces, WithBulkCopies) { EXPECT_RACE(bulk_copy, 64, "shared memory"); }
TEST(EmulatorRaces, WithProductsOfOtherWarps) { EXPECT_PRODUCT_RACE(barrier_before, "shared memory"); }
TEST(EmulatorRaces, WithProductsWithoutFence) {
  EXPECT_PRODUCT_RACE(fence, "without the async proxy's fence");
}
TEST(EmulatorRaces, BehindProductsOfOtherWarps) { EXPECT_PRODUCT_RACE(barrier_after, "shared memory"); }
TEST(EmulatorRaces, BetweenBlocks) { EXPECT_RACE(tell_other_block, 1, "global memory", 2); }

// A kernel that begins early, and the one behind it.
__global__ void write_number(float* to, float value) { *to = value; }
template <bool waits>
__global__ void read_early(float* to) {
  if (waits) wait_for_previous_kernel();
  to[1] = to[0];
}
TEST(EmulatorRaces, WithTheKernelAhead) {
#ifdef TILEWISE_EMULATOR_RACES
  const DeviceMemory memory(64);
  auto* to = reinterpret_cast<float*>(memory.data());
  const auto run = [&]<auto kernel>(bool early) {
    launch<write_number>({.name = "first", .blocks = 1, .threads = 1}, to, to[0] + 1);
    launch<kernel>({.name = "second", .blocks = 1, .threads = 1, .early = early}, to);
    const bool fine = cudaDeviceSynchronize() == cudaSuccess;
    if (!fine) EXPECT_THROW(launch<kernel>({.name = "next", .blocks = 1, .threads = 1}, to), DeviceError);
    cudaGetLastError();
    return fine;
  };
  EXPECT_TRUE(run.template operator()<read_early<true>>(true));
  EXPECT_TRUE(run.template operator()<read_early<false>>(false));
  EXPECT_FALSE(run.template operator()<read_early<false>>(true));
#else
  GTEST_SKIP() << "built without TILEWISE_EMULATOR_RACES";
#endif
}

}  // namespace
}  // namespace tilewise::test::emulator_test
