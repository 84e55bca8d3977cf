#include <gtest/gtest.h>

#include <string>

#include "cuda/device_tensors.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/fault.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::test::launch_test {
namespace {

using cuda::launch;

// Thread 0 of each block counts itself after a word has passed through the last of the dynamic shared memory.
__global__ void count_blocks(int* count, int shared_words) {
  TILEWISE_DYNAMIC_SHARED(int, words, 16);
  if (threadIdx.x != 0) return;
  int* last = shared_words > 0 ? words + shared_words - 1 : nullptr;
  if (last != nullptr) *last = 1;
  atomicAdd(count, last != nullptr ? *last : 1);
}

__global__ void trap() { __trap(); }

std::string launch_error(const cuda::Launch& how, int* count) {
  try {
    launch<count_blocks>(how, count, 0);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "no error";
}

class CudaLaunchErrors : public CudaTest {};

class CudaLaunch : public CudaTest {
 protected:
  int counted(const cuda::Launch& how, int shared_words = 0) {
    const DeviceMemory memory(sizeof(int));
    memory.fill(0);
    launch<count_blocks>(how, reinterpret_cast<int*>(memory.data()), shared_words);
    int count = 0;
    copy_to_host(std::as_writable_bytes(std::span(&count, 1)), memory.data());
    return count;
  }
};

TEST_F(CudaLaunch, RunsAsManyBlocksAsAsked) {
  EXPECT_EQ(counted({.name = "counting", .blocks = 1, .threads = 32}), 1);
  EXPECT_EQ(counted({.name = "counting", .blocks = 70000, .threads = 64}), 70000);
  EXPECT_EQ(counted({.name = "counting", .blocks = 0, .threads = 64}), 0);
}

TEST_F(CudaLaunch, GivesMoreSharedMemoryThanTheDefaultLimit) {
  constexpr int bytes = 60 * 1024;  // every device from sm_75 on has it
  for (int launch = 0; launch < 2; ++launch) {
    EXPECT_EQ(counted({.name = "counting", .blocks = 5, .threads = 32, .shared_bytes = bytes}, bytes / 4), 5);
  }
}

TEST_F(CudaLaunchErrors, NameTheKernel) {
  const DeviceMemory memory(sizeof(int));
  auto* count = reinterpret_cast<int*>(memory.data());
  const auto expect_named = [&](const cuda::Launch& how, const std::string& rest) {
    const std::string error = launch_error(how, count);
    EXPECT_EQ(error.rfind("counting: ", 0), 0u) << error;
    EXPECT_NE(error.find(rest), std::string::npos) << error;
  };
  expect_named({.name = "counting", .blocks = 1, .threads = 4096}, "cudaError");
  expect_named({.name = "counting", .blocks = std::int64_t{1} << 31, .threads = 32}, "2^31 - 1 blocks");
  // A launch that failed leaves nothing behind.
  EXPECT_EQ(launch_error({.name = "counting", .blocks = 1, .threads = 32}, count), "no error");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// A kernel of its own: the limit is raised once for each.
__global__ void touch_shared() {
  TILEWISE_DYNAMIC_SHARED(int, words, 16);
  words[threadIdx.x] = 0;
}

TEST_F(CudaLaunchErrors, NameTheKernelThatAsksForTooMuchSharedMemory) {
  try {
    launch<touch_shared>(
        {.name = "touching", .blocks = 1, .threads = 32, .shared_bytes = std::size_t{64} << 20});
    ADD_FAILURE() << "no exception";
  } catch (const DeviceError& error) {
    EXPECT_EQ(std::string(error.what()).rfind("touching: cudaError", 0), 0u) << error.what();
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace tilewise::test::launch_test

void tilewise::test::fault_on_device() {
  cuda::launch<launch_test::trap>({.name = "trap", .blocks = 1, .threads = 1});
  cudaDeviceSynchronize();
}
