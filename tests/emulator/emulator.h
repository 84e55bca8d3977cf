#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

// Runs CUDA kernels on the CPU. The kernels' sources are compiled as C++; a CUDA thread is a fiber, a block
// runs on one thread of the operating system, and a fiber goes on until it has to wait. What a GPU does in
// hardware (barriers, shuffles, tensor cores, bulk copies) is done by the functions here and those of
// include/cuda/ptx. Results are those of the same arithmetic, up to the order in which tensor cores add;
// speed says nothing.

namespace tilewise::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Warp;
struct Block;

/// What a thread asked the hardware to do, in groups that it can wait for, oldest first.
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

  // Its fiber.
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;            // AddressSanitizer's
  bool (*ready)(const void*) = nullptr;  // what it waits for, null where it can go on
  const void* waits_for = nullptr;
  const char* waits_at = "";
  bool done = false;

  int registers = 0;  // as many as setmaxnreg left it, 0 before that
  Groups copies, stores;
  std::uint64_t products = 0;                 // how many it has asked for
  std::vector<std::uint64_t> product_groups;  // how many it had at the end of each group
};

extern thread_local Thread* self;
/// Of the block that runs on this thread of the operating system.
extern thread_local Index block_index, block_extent, grid_extent;

struct Launched {
  const char* name;
  Index grid;
  unsigned threads;
  std::size_t shared_bytes;
  bool early = false;  // may begin before the kernel ahead has ended
};

/// Runs a kernel, or records it where a graph is being captured. Throws std::runtime_error where its threads
/// wait for each other for ever, with what they wait for.
void launch(const Launched& how, void* stream, std::function<void()> kernel);

/// Lets other threads run until `ready(state)`. `at` is for the message when that never comes.
void wait_until(bool (*ready)(const void*), const void* state, const char* at);
template <typename Condition>
void wait_for(const Condition& condition, const char* at) {
  wait_until([](const void* state) { return (*static_cast<const Condition*>(state))(); }, &condition, at);
}

// What the hardware does in its own time is done at once, or, with TILEWISE_EMULATOR_LATE=1, as late as it
// can be: when a thread waits for it, or no thread of the block can go on without it. A kernel that forgets
// to wait fails in one of the two.

/// For tests: as the environment has it, or not.
void set_late(bool late);

/// cp.async: `bytes` of `size`, and zeros for the others.
void copy_later(void* to_shared, const void* from, int bytes, int size);
void commit_copies();
void wait_copies(int groups);

/// The kernel did something that a GPU does not define; ends it with a message.
[[noreturn]] void fail(const char* what);

// Shared memory.
std::byte* dynamic_shared();
std::uint32_t shared_address(const void* pointer);
std::byte* shared_pointer(std::uint32_t address, std::size_t bytes);
/// The same place in the shared memory of another block of the grid's same row, which has begun.
std::byte* shared_pointer_in(unsigned block, const void* pointer);

// Barriers of a block: 0 is __syncthreads'.
void sync_block();
void sync_named(int number, int threads);
void arrive_named(int number, int threads);
bool any_of_named(int number, int threads, bool value);
void sync_pair_of_blocks();

/// __syncwarp. Shuffles and votes put nothing in order that lanes wrote.
void sync_lanes(unsigned mask);

/// setmaxnreg: the thread gives registers back to its block, or waits until there are enough to take.
void set_registers(int registers);

/// Every lane of the mask gives bytes, and gets those of all, `stride` apart by lane. They stay until the
/// lane's next call but one.
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

/// Tensor cores by warp: c += a b, of 16 x 8 elements and 16 summands, as mma.sync's fragments hold them.
void multiply_by_warp(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bool bf16);

// Tensor cores by warpgroup: c (64 x n) of a and b, 16 summands.
struct Product {
  float* c = nullptr;        ///< this thread's part
  std::uint32_t a[4] = {};   ///< where from registers
  std::uint64_t a_tile = 0;  ///< else its descriptor
  std::uint64_t b_tile = 0;
  int n = 0;
  bool a_in_registers = false, turned_a = false, turned_b = false, add = false, bf16 = false;
};
void multiply(const Product& own);
void commit_products();
void wait_products(int groups);

// Barriers in shared memory, a word of 64 bits each.
void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals);
void mbarrier_arrive(std::uint64_t* barrier, std::uint32_t expected_bytes);
void mbarrier_complete(std::uint64_t* barrier, std::uint32_t bytes);
void mbarrier_wait(const std::uint64_t* barrier, std::uint32_t parity);

// Bulk copies of boxes of a tensor (CUtensorMap).
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
