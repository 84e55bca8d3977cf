#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

// Runs CUDA kernels on the CPU. The sources of kernels are compiled as C++. A CUDA thread is a fiber, which
// runs until it has to wait, and a block (CTA) runs on one thread of the operating system. The functions here
// and those in include/cuda/ptx do what a GPU does in hardware: barriers, shuffles, tensor cores, bulk
// copies. Results are those of a GPU up to the order in which tensor cores add. Times mean nothing.

namespace tilewise::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Warp;
struct Block;

/// The asynchronous operations that a thread started, oldest first, in groups for which it can wait.
struct Groups {
  std::deque<std::pair<std::uint64_t, std::function<void()>>> work;
  std::uint64_t committed = 0;
};

/// A CUDA thread.
struct Thread {
  Index index;
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;

  // Its fiber:
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;            // AddressSanitizer's
  bool (*ready)(const void*) = nullptr;  // the condition for which it waits; null if it can run
  const void* waits_for = nullptr;
  const char* waits_at = "";
  bool done = false;

  int registers = 0;  // the last setmaxnreg, or 0
  Groups copies, stores;
  std::uint64_t products = 0;                 // the number of products that it started
  std::vector<std::uint64_t> product_groups;  // that number at the end of each group
};

extern thread_local Thread* self;
/// Those of the block that runs on this thread of the operating system.
extern thread_local Index block_index, block_extent, grid_extent;

struct Launched {
  const char* name;
  Index grid;
  unsigned threads;
  std::size_t shared_bytes;
  bool early = false;  // PDL: it may start before the previous kernel has ended
};

/// Runs a kernel, or records it if a graph is being captured from the stream. A deadlock is a fault whose
/// message says for what the threads wait.
void launch(const Launched& how, void* stream, std::function<void()> kernel);

/// Lets other threads run until `ready(state)` is true. `at` names the wait in the message about a deadlock.
void wait_until(bool (*ready)(const void*), const void* state, const char* at);
template <typename Condition>
void wait_for(const Condition& condition, const char* at) {
  wait_until([](const void* state) { return (*static_cast<const Condition*>(state))(); }, &condition, at);
}

// Asynchronous operations of the hardware are done immediately or, with TILEWISE_EMULATOR_LATE=1, as late as
// possible: when a thread waits for them, or when no thread of the block can continue without them. A kernel
// that forgets to wait fails in one of the two modes.

/// Sets the mode, for tests.
void set_late(bool late);

/// cp.async: copies `bytes` and fills the rest of `size` bytes with zeros.
void copy_later(void* to_shared, const void* from, int bytes, int size);
void commit_copies();
void wait_copies(int groups);

/// Ends the kernel with a message, because it did something that is undefined on a GPU.
[[noreturn]] void fail(const char* what);

// Shared memory.
std::byte* dynamic_shared();
std::uint32_t shared_address(const void* pointer);
std::byte* shared_pointer(std::uint32_t address, std::size_t bytes);
/// The same address in the shared memory of another block of the cluster, which must have started.
std::byte* shared_pointer_in(unsigned block, const void* pointer);

// Barriers of a block. Barrier 0 is that of __syncthreads.
void sync_block();
void sync_named(int number, int threads);
void arrive_named(int number, int threads);
bool any_of_named(int number, int threads, bool value);
void sync_pair_of_blocks();

/// __syncwarp. Shuffles and votes do not order memory accesses of lanes, so they do not call it.
void sync_lanes(unsigned mask);

/// setmaxnreg: the thread returns registers to its block, or waits until the block has enough for it.
void set_registers(int registers);

/// Every lane of the mask passes bytes and gets those of all lanes, most_bytes apart. They remain valid until
/// the lane's next call but one.
constexpr std::size_t most_bytes = 64;
const std::byte* exchange_bytes(unsigned mask, const void* own, std::size_t bytes);
template <typename T>
struct Lanes {
  const std::byte* all;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, all + static_cast<std::size_t>(lane) * most_bytes, sizeof(T));
    return value;
  }
};
template <typename T>
Lanes<T> exchange(unsigned mask, const T& own) {
  static_assert(sizeof(T) <= most_bytes);
  return {exchange_bytes(mask, &own, sizeof(T))};
}

/// Tensor cores of a warp: C += A·B with M = 16, N = 8 and K = 16, in the fragment layout of mma.sync.
void multiply_by_warp(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bool bf16);

// Tensor cores of a warpgroup (wgmma): C = A·B with M = 64, N = n and K = 16.
struct Product {
  float* c = nullptr;        ///< this thread's fragment
  std::uint32_t a[4] = {};   ///< if A is in registers
  std::uint64_t a_tile = 0;  ///< else its descriptor in shared memory
  std::uint64_t b_tile = 0;
  int n = 0;
  bool a_in_registers = false, turned_a = false, turned_b = false, add = false, bf16 = false;
};
void multiply(const Product& own);
void commit_products();
void wait_products(int groups);

// mbarriers: barriers in shared memory, words of 64 bits.
void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals);
void mbarrier_arrive(std::uint64_t* barrier, std::uint32_t expected_bytes);
void mbarrier_complete(std::uint64_t* barrier, std::uint32_t bytes);
void mbarrier_wait(const std::uint64_t* barrier, std::uint32_t parity);

// Bulk copies (TMA): boxes of a tensor (CUtensorMap), and contiguous bytes.
void load_box(void* to_shared, const void* map, std::uint64_t* barrier, const std::int32_t* place, int rank);
void load_box_to_pair(void* to_shared, const void* map, std::uint64_t* barrier, const std::int32_t* place,
                      int rank);
void store_box(const void* map, const void* from_shared, const std::int32_t* place, int rank);
void add_floats(float* to, const float* from_shared, int bytes);
void commit_stores();
void wait_stores(int groups);
void wait_stores_read(int groups);
void load_bytes(void* to_shared, const void* from, std::uint32_t bytes, std::uint64_t* barrier);

}  // namespace tilewise::emulator
