#include "emulator.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "fiber.h"
#include "graph.h"
#include "races/races.h"
#include "tilewise/error.h"

namespace tilewise::emulator {

thread_local Thread* self = nullptr;
thread_local Index block_index, block_extent, grid_extent;

// The bytes that the lanes of a mask exchange. There are two sets of slots, since a lane may make its next
// call while others still read the slots of this one.
struct Exchange {
  unsigned mask = 0;
  int arrived = 0;
  unsigned generation = 0;
  races::SyncOwner sync = {};
  alignas(16) std::byte slots[2][32][most_bytes] = {};
};

struct Warp {
  unsigned alive = 0;
  std::deque<Exchange> exchanges;  // one per mask
  int warpgroup = 0;
};

// Four warps and their products. A product can run when all 128 threads have started it.
struct Warpgroup {
  struct Asked {
    std::array<Product, 128> of;
    int arrived = 0;
    races::Asked clocks;
  };
  std::deque<Asked> asked;  // the products from number `first` on
  std::uint64_t first = 0;  // all products before it are done
};

struct NamedBarrier {
  int arrived = 0, threads = 0;
  unsigned generation = 0;
  bool any = false, any_of[2] = {};
  races::SyncOwner sync;
};

struct Block {
  unsigned number = 0;
  std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, &std::free};
  std::byte* dynamic = nullptr;
  std::size_t dynamic_bytes = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  races::SyncOwner pair_sync;  // for the threads of this block at the barrier of two blocks
  int alive = 0;
  std::deque<std::function<void()>> pending;  // bulk copies that are not done yet
  int free_registers = 0;                     // registers that threads returned

  // The number of registers per thread if the block has an SM for itself.
  int first_registers() const {
    constexpr int of_sm = 65536, unit = 8, most = 255;
    const int each = of_sm / static_cast<int>(threads.size()) / unit * unit;
    return each < most ? each : most;
  }
};

namespace {

bool setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && *value != '0';
}
std::atomic<bool>& late() {
  static std::atomic<bool> value = setting("TILEWISE_EMULATOR_LATE");
  return value;
}

// The order in which threads run: by number, or random in every round with TILEWISE_EMULATOR_SEED.
class Order {
 public:
  Order() {
    if (const char* seed = std::getenv("TILEWISE_EMULATOR_SEED")) {
      random_.seed(static_cast<unsigned>(std::strtoul(seed, nullptr, 10)));
      drawn_ = true;
    }
  }
  // The first thread of a round, and a step that is coprime to every possible number of threads.
  std::pair<std::size_t, std::size_t> next(std::size_t count) {
    if (!drawn_) return {0, 1};
    static constexpr std::array<std::size_t, 4> steps = {1, 7, 31, 1021};
    return {random_() % count, steps[random_() % steps.size()]};
  }

 private:
  std::mt19937 random_;
  bool drawn_ = false;
};

struct PairBarrier {
  std::atomic<unsigned> arrived{0}, generation{0};
};

struct Grid {
  Grid(const Launched& launched, const std::function<void()>& function)
      : how(launched), kernel(function), total(launched.grid.x * launched.grid.y) {}

  const Launched& how;
  const std::function<void()>& kernel;
  unsigned total;
  std::atomic<unsigned> next{0};
  std::atomic<std::uint64_t> progress{0};
  std::atomic<int> workers{0};
  std::atomic<bool> failed{false};
  std::mutex lock;
  std::string error;
  std::vector<std::thread> more;
  std::map<unsigned, Block*> running;
  std::map<unsigned, PairBarrier> pairs;
  std::set<std::thread::id> stuck;  // workers whose threads all wait, at progress `stuck_at`
  std::uint64_t stuck_at = 0;

  void work();
  void run_block(unsigned number);
  void wait_for_others(Block& block, std::uint64_t seen);
  void start_worker();
  void set_error(const std::string& message) {
    const std::lock_guard guard(lock);
    if (error.empty()) error = message;
    failed = true;
  }
};

thread_local Grid* grid = nullptr;
thread_local char anchor;  // addresses of static shared memory, which is thread-local, are relative to it
thread_local void* scheduler_stack = nullptr;
thread_local FiberStacks stacks;
thread_local Order order;

Block& block_of(const Thread* thread) { return *thread->block; }

void leave(Thread& thread) {
  Block& block = block_of(&thread);
  for (auto& [group, work] : thread.stores.work) work();
  thread.stores.work.clear();
  races::end_thread();
  --block.alive;
  thread.warp->alive &= ~(1u << thread.lane);
  NamedBarrier& all = block.barriers[0];
  if (block.alive > 0 && all.arrived == block.alive) {
    all.arrived = 0;
    ++all.generation;
    races::complete(all.sync);
  }
  thread.done = true;
}

void run_thread() {
  finish_switch(self->fake_stack, stacks);
  grid->kernel();
  Thread& thread = *self;
  leave(thread);
  switch_fiber(&thread.stack_pointer, scheduler_stack, nullptr, stacks);
  std::abort();
}

std::string described(const Block& block) {
  std::map<std::string, std::vector<std::size_t>> waits;
  for (std::size_t n = 0; n < block.threads.size(); ++n) {
    if (!block.threads[n].done) waits[block.threads[n].waits_at].push_back(n);
  }
  std::ostringstream text;
  text << "block " << block.number << ":";
  for (const auto& [at, threads] : waits) {
    text << " " << threads.size() << " threads (" << threads.front() << " to " << threads.back() << ") at "
         << at << ";";
  }
  return text.str();
}

}  // namespace

void set_late(bool value) { late() = value; }

void wait_until(bool (*ready)(const void*), const void* state, const char* at) {
  if (ready(state)) return;
  Thread& thread = *self;
  thread.ready = ready;
  thread.waits_for = state;
  thread.waits_at = at;
  switch_fiber(&thread.stack_pointer, scheduler_stack, &thread.fake_stack, stacks);
  thread.ready = nullptr;
}

void fail(const char* what) {
  Thread& thread = *self;
  grid->set_error(std::string(grid->how.name) + ": " + what + " (block " +
                  std::to_string(block_of(&thread).number) + ", thread " + std::to_string(thread.index.x) +
                  ")");
  static const int never = 0;
  wait_until([](const void*) { return false; }, &never, what);
  std::abort();
}

void Grid::start_worker() {
  ++workers;
  const std::lock_guard guard(lock);
  more.emplace_back([this] { work(); });
}

// Called when no thread of the block can run, so that another block must make progress: one that runs, or one
// that has not started. `seen` is the progress before this worker looked at its threads. Nothing can run only
// if all workers have looked at their threads without any progress in between; a worker that sleeps has not
// looked.
void Grid::wait_for_others(Block& block, std::uint64_t seen) {
  bool nobody = false;
  {
    const std::lock_guard guard(lock);
    if (stuck_at != seen) stuck.clear();
    stuck_at = seen;
    stuck.insert(std::this_thread::get_id());
    nobody = progress == seen && static_cast<int>(stuck.size()) == workers;
    if (nobody) stuck.clear();
  }
  if (nobody && next < total) {
    start_worker();
  } else if (nobody) {
    set_error(std::string(how.name) + ": threads wait for each other for ever. " + described(block));
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Grid::run_block(unsigned number) {
  Block block;
  block.number = number;
  block_index = {number % how.grid.x, number / how.grid.x, 0};
  block_extent = {how.threads, 1, 1};
  grid_extent = how.grid;
  constexpr std::size_t alignment = 1024;
  block.dynamic_bytes = how.shared_bytes;
  // Memory past the exact size is poisoned for AddressSanitizer. The contents are NaN until they are written.
  block.memory.reset(static_cast<std::byte*>(
      std::aligned_alloc(alignment, (how.shared_bytes + alignment) / alignment * alignment)));
  block.dynamic = block.memory.get();
  std::memset(block.dynamic, 0xFF, how.shared_bytes);
  poison_behind(block.dynamic + how.shared_bytes,
                (how.shared_bytes + alignment) / alignment * alignment - how.shared_bytes);
  block.threads.resize(how.threads);
  block.warps.resize((how.threads + 31) / 32);
  block.warpgroups.resize((how.threads + 127) / 128);
  block.alive = static_cast<int>(how.threads);
  for (unsigned n = 0; n < how.threads; ++n) {
    Thread& thread = block.threads[n];
    thread.index = {n, 0, 0};
    thread.lane = static_cast<int>(n % 32);
    thread.warp = &block.warps[n / 32];
    thread.warp->alive |= 1u << thread.lane;
    thread.warp->warpgroup = static_cast<int>(n / 128);
    thread.block = &block;
    thread.stack_pointer = stacks.begin(n, &run_thread);
  }
  races::begin_block(number, how.threads, block.dynamic, block.dynamic_bytes);
  {
    const std::lock_guard guard(lock);
    running[number] = &block;
  }
  while (block.alive > 0 && !failed) {
    bool moved = false;
    const std::uint64_t seen = progress;
    const std::size_t count = block.threads.size();
    auto [at, step] = order.next(count);
    for (std::size_t n = 0; n < count; ++n, at = (at + step) % count) {
      Thread& thread = block.threads[at];
      if (thread.done || (thread.ready != nullptr && !thread.ready(thread.waits_for))) continue;
      moved = true;
      self = &thread;
      resume_fiber(&scheduler_stack, thread.stack_pointer, thread.fake_stack, stacks, thread.index.x);
      self = nullptr;
      if (failed) break;
    }
    if (moved) {
      ++progress;
      continue;
    }
    if (!block.pending.empty()) {
      const auto work = std::move(block.pending.front());
      block.pending.pop_front();
      work();
      ++progress;
      continue;
    }
    wait_for_others(block, seen);
  }
  for (auto& work : block.pending) work();
  races::end_block();
  unpoison_behind(block.dynamic + how.shared_bytes,
                  (how.shared_bytes + alignment) / alignment * alignment - how.shared_bytes);
  const std::lock_guard guard(lock);
  running.erase(number);
}

void Grid::work() {
  grid = this;
  for (unsigned number = next++; number < total && !failed; number = next++) run_block(number);
  --workers;
  grid = nullptr;
}

namespace {

void run(const Launched& how, void* stream, const std::function<void()>& kernel) {
  races::begin_launch(how.name, stream, how.early);
  Grid launched(how, kernel);
  launched.workers = 1;
  launched.work();
  for (std::size_t n = 0; n < launched.more.size(); ++n) launched.more[n].join();
  const char* race = races::end_launch();
  if (race != nullptr && !launched.failed) launched.set_error(std::string(how.name) + ": " + race);
  if (launched.failed) report_fault(launched.error);
}

}  // namespace

void launch(const Launched& how, void* stream, std::function<void()> kernel) {
  const std::string name = how.name;
  if (how.grid.x > 0x7FFFFFFF || how.grid.y > 0xFFFF || how.threads > 1024 ||
      how.shared_bytes > most_shared_bytes()) {
    throw DeviceError(name + ": cudaErrorInvalidConfiguration (the emulator)");
  }
  if (const std::string fault = take_fault(); !fault.empty()) {
    throw DeviceError(name + ": cudaErrorLaunchFailure (" + fault + ")");
  }
  if (capturing(stream)) {
    record(stream, [how, stream, kernel = std::move(kernel)] { run(how, stream, kernel); });
  } else {
    run(how, stream, kernel);
  }
}

// Shared memory. Its 32-bit addresses start at 1024 for dynamic memory, as on sm_90, and at 2^31 for static
// memory.

namespace {

constexpr std::uint32_t first_dynamic = 1024, first_static = 0x80000000u;

bool is_dynamic(const Block& block, const void* pointer) {
  const auto* at = static_cast<const std::byte*>(pointer);
  return at >= block.dynamic && at <= block.dynamic + block.dynamic_bytes;
}

}  // namespace

std::byte* dynamic_shared() { return block_of(self).dynamic; }

std::uint32_t shared_address(const void* pointer) {
  const Block& block = block_of(self);
  if (is_dynamic(block, pointer)) {
    return first_dynamic + static_cast<std::uint32_t>(static_cast<const std::byte*>(pointer) - block.dynamic);
  }
  return first_static + static_cast<std::uint32_t>(static_cast<const char*>(pointer) - &anchor);
}

std::byte* shared_pointer(std::uint32_t address, std::size_t bytes) {
  const Block& block = block_of(self);
  if (address >= first_static / 2) {
    return reinterpret_cast<std::byte*>(&anchor) + static_cast<std::int32_t>(address - first_static);
  }
  if (address < first_dynamic || address - first_dynamic + bytes > block.dynamic_bytes) {
    fail("an address outside the block's shared memory");
  }
  return block.dynamic + (address - first_dynamic);
}

std::byte* shared_pointer_in(unsigned number, const void* pointer) {
  const std::lock_guard guard(grid->lock);
  const auto found = grid->running.find(number);
  if (found == grid->running.end()) fail("shared memory of a block that does not run");
  return found->second->dynamic + (static_cast<const std::byte*>(pointer) - block_of(self).dynamic);
}

// Barriers.

namespace {

bool pass(NamedBarrier& barrier, int threads, bool value, bool waits, const char* at) {
  barrier.any |= value;
  races::arrive(barrier.sync);
  const unsigned generation = barrier.generation;
  if (barrier.arrived == 0) {
    barrier.threads = threads;
  } else if (barrier.threads != threads && &barrier != &block_of(self).barriers[0]) {
    fail("a barrier that threads enter with different counts");
  }
  if (++barrier.arrived == threads) {
    barrier.any_of[generation % 2] = barrier.any;
    barrier.any = false;
    barrier.arrived = 0;
    ++barrier.generation;
    races::complete(barrier.sync);
  } else if (waits) {
    wait_for([&] { return barrier.generation != generation; }, at);
  }
  if (waits) races::pass(barrier.sync);
  return barrier.any_of[generation % 2];
}

}  // namespace

void sync_block() {
  Block& block = block_of(self);
  pass(block.barriers[0], block.alive, false, true, "__syncthreads");
}

void sync_named(int number, int threads) {
  static constexpr std::array names = {"barrier 0",  "barrier 1",  "barrier 2",  "barrier 3",
                                       "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
                                       "barrier 8",  "barrier 9",  "barrier 10", "barrier 11",
                                       "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
  if (number < 0 || number > 15) fail("a barrier above 15");
  pass(block_of(self).barriers[number], threads, false, true, names[static_cast<std::size_t>(number)]);
}
void arrive_named(int number, int threads) {
  if (number < 0 || number > 15) fail("a barrier above 15");
  pass(block_of(self).barriers[number], threads, false, false, "");
}
bool any_of_named(int number, int threads, bool value) {
  return pass(block_of(self).barriers[number], threads, value, true, "bar.red");
}

void set_registers(int registers) {
  Block& block = block_of(self);
  const int had = self->registers == 0 ? block.first_registers() : self->registers;
  const int more = registers - had;
  if (more > 0) wait_for([&] { return block.free_registers >= more; }, "setmaxnreg, for registers");
  block.free_registers -= more;
  self->registers = registers;
}

void sync_pair_of_blocks() {
  PairBarrier* barrier = nullptr;
  {
    const std::lock_guard guard(grid->lock);
    barrier = &grid->pairs[block_of(self).number / 2];
  }
  races::arrive(block_of(self).pair_sync);
  const unsigned generation = barrier->generation;
  if (++barrier->arrived == 2 * grid->how.threads) {
    barrier->arrived = 0;
    ++barrier->generation;
  } else {
    wait_for([&] { return barrier->generation != generation; }, "the barrier of two blocks");
  }
  races::complete(block_of(self).pair_sync);
  races::pass(block_of(self).pair_sync);
}

namespace {

Exchange& exchange_of(Warp& warp, unsigned mask) {
  for (Exchange& one : warp.exchanges) {
    if (one.mask == mask) return one;
  }
  return warp.exchanges.emplace_back(Exchange{.mask = mask});
}

// The lanes of the mask meet. The last one calls `complete(slots)`. Returns the slots.
template <typename Complete>
std::byte* meet(unsigned mask, const void* own, std::size_t bytes, const Complete& complete) {
  Thread& thread = *self;
  Warp& warp = *thread.warp;
  if (!(mask >> thread.lane & 1)) fail("a lane outside the mask it gives");
  Exchange& all = exchange_of(warp, mask);
  const unsigned generation = all.generation;
  std::memcpy(all.slots[generation % 2][thread.lane], own, bytes);
  ++all.arrived;
  const auto met = [&] { return all.arrived >= __builtin_popcount(mask & warp.alive); };
  if (!met()) wait_for([&] { return all.generation != generation || met(); }, "lanes of its warp");
  if (all.generation == generation) {
    complete(all.slots[generation % 2]);
    all.arrived = 0;
    ++all.generation;
  }
  return all.slots[generation % 2][0];
}

}  // namespace

const std::byte* exchange_bytes(unsigned mask, const void* own, std::size_t bytes) {
  return meet(mask, own, bytes, [](const auto&) {});
}

void sync_lanes(unsigned mask) {
  races::SyncOwner& sync = exchange_of(*self->warp, mask).sync;
  races::arrive(sync);
  exchange(mask, 0);
  races::complete(sync);
  races::pass(sync);
}

// Copies and stores in groups.

namespace {

void ask(Groups& groups, std::function<void()> work) {
  if (late()) {
    groups.work.emplace_back(groups.committed, std::move(work));
  } else {
    work();
  }
}
void wait_groups(Groups& groups, int under_way) {
  while (!groups.work.empty() &&
         groups.work.front().first + static_cast<std::uint64_t>(under_way) < groups.committed) {
    groups.work.front().second();
    groups.work.pop_front();
  }
}
void do_later(std::function<void()> work) {
  if (late()) {
    block_of(self).pending.push_back(std::move(work));
  } else {
    work();
  }
}

}  // namespace

void copy_later(void* to_shared, const void* from, int bytes, int size) {
  races::set_place(__builtin_return_address(0));
  races::read_by_copy(from, static_cast<std::size_t>(bytes), nullptr);
  races::write_by_async_copy(to_shared, static_cast<std::size_t>(size), self->copies.committed);
  ask(self->copies, [=] {
    std::memset(to_shared, 0, static_cast<std::size_t>(size));
    std::memcpy(to_shared, from, static_cast<std::size_t>(bytes));
  });
}
void commit_copies() { ++self->copies.committed; }
namespace {

// The first group that may still be in flight.
std::uint64_t first_of(const Groups& groups, int under_way) {
  const auto most = static_cast<std::uint64_t>(under_way);
  return groups.committed > most ? groups.committed - most : 0;
}

}  // namespace

void wait_copies(int groups) {
  wait_groups(self->copies, groups);
  races::async_copies_done(first_of(self->copies, groups));
}

void add_floats(float* to, const float* from_shared, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(from_shared) % 16 != 0 || bytes % 16 != 0) {
    fail("cp.reduce.async.bulk of odd addresses or bytes");
  }
  races::set_place(__builtin_return_address(0));
  races::read_by_store(from_shared, static_cast<std::size_t>(bytes), self->stores.committed);
  races::write_by_store(to, static_cast<std::size_t>(bytes), self->stores.committed, true);
  ask(self->stores, [=] {
    for (int n = 0; n < bytes / 4; ++n) {
      std::atomic_ref<float> word(to[n]);
      float before = word.load();
      while (!word.compare_exchange_weak(before, before + from_shared[n])) {
      }
    }
  });
}
void commit_stores() { ++self->stores.committed; }
void wait_stores(int groups) {
  wait_groups(self->stores, groups);
  races::stores_done(first_of(self->stores, groups));
}
void wait_stores_read(int groups) {
  wait_groups(self->stores, groups);
  races::stores_read(first_of(self->stores, groups));
}

// mbarriers: a word has the bytes and arrivals that are still expected in this phase, the arrivals per phase,
// and the parity of the phase.

namespace {

struct Mbarrier {
  std::int32_t bytes;
  std::uint16_t arrivals;
  std::uint16_t state;  // the parity in the highest bit, below it the arrivals that are still expected
};
static_assert(sizeof(Mbarrier) == 8);
constexpr std::uint16_t phase_bit = 0x8000;

template <typename Change>
void change(std::uint64_t* barrier, const Change& by) {
  std::atomic_ref<std::uint64_t> word(*barrier);
  std::uint64_t before = word.load(), after = 0;
  bool over = false;
  do {
    auto now = std::bit_cast<Mbarrier>(before);
    by(now);
    over = (now.state & ~phase_bit) == 0 && now.bytes == 0;
    if (over) {
      now.state = static_cast<std::uint16_t>((now.state ^ phase_bit) | now.arrivals);
    }
    after = std::bit_cast<std::uint64_t>(now);
    // Called before other threads can see the end of the phase, so that they take the clock of this moment.
    if (over) races::phase_over(barrier);
  } while (!word.compare_exchange_weak(before, after));
}

}  // namespace

void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  const auto count = static_cast<std::uint16_t>(arrivals);
  *barrier = std::bit_cast<std::uint64_t>(Mbarrier{.bytes = 0, .arrivals = count, .state = count});
  races::set_place(__builtin_return_address(0));
  races::init(barrier);
}

void mbarrier_arrive(std::uint64_t* barrier, std::uint32_t expected_bytes) {
  if ((std::bit_cast<Mbarrier>(std::atomic_ref(*barrier).load()).state & ~phase_bit) == 0) {
    fail("more arrivals at an mbarrier than it was made for, or none was made");
  }
  races::set_place(__builtin_return_address(0));
  races::arrive_at(barrier);
  change(barrier, [&](Mbarrier& now) {
    now.bytes += static_cast<std::int32_t>(expected_bytes);
    --now.state;
  });
}

void mbarrier_complete(std::uint64_t* barrier, std::uint32_t bytes) {
  change(barrier, [&](Mbarrier& now) { now.bytes -= static_cast<std::int32_t>(bytes); });
}

void mbarrier_wait(const std::uint64_t* barrier, std::uint32_t parity) {
  const auto over = [=] {
    const auto now = std::bit_cast<Mbarrier>(__atomic_load_n(barrier, __ATOMIC_ACQUIRE));
    return ((now.state & phase_bit) != 0) == ((parity & 1) == 0);
  };
  static thread_local std::map<std::uint32_t, std::string> names;
  const std::uint32_t address = shared_address(barrier);
  std::string& name = names[address];
  if (name.empty()) name = "the mbarrier at shared address " + std::to_string(address);
  wait_for(over, name.c_str());
  races::set_place(__builtin_return_address(0));
  races::waited_for(barrier);
}

// Boxes of tensors.

namespace {

struct Copied {
  TensorMap map;
  std::int32_t place[5] = {};
};

// Applies the swizzle of TMA to an address: it permutes the 16-byte chunks of each row.
std::size_t swizzled(std::size_t address, int swizzle) {
  const std::size_t bits = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
  return address ^ ((address >> 7) & bits) << 4;
}

// Calls body(offset in shared memory, pointer to global memory) for every element of the box. The pointer is
// null outside the tensor.
template <typename Body>
void for_each_element(const Copied& copied, std::uint32_t shared, const Body& body) {
  const TensorMap& map = copied.map;
  std::int64_t at[5] = {};
  std::size_t count = 1;
  for (int dim = 0; dim < map.rank; ++dim) count *= map.box[dim];
  std::size_t offset = 0;
  for (std::size_t n = 0; n < count; ++n) {
    bool inside = true;
    const std::byte* from = static_cast<const std::byte*>(map.data);
    for (int dim = 0; dim < map.rank; ++dim) {
      const std::int64_t i = copied.place[dim] + at[dim];
      inside &= i >= 0 && i < static_cast<std::int64_t>(map.extents[dim]);
      from += i * (dim == 0 ? map.element_bytes : static_cast<std::int64_t>(map.strides[dim - 1]));
    }
    body(swizzled(shared + offset, map.swizzle) - shared, inside ? from : nullptr);
    offset += static_cast<std::size_t>(map.element_bytes);
    for (int dim = 0; dim < map.rank; ++dim) {
      if (++at[dim] < static_cast<std::int64_t>(map.box[dim])) break;
      at[dim] = 0;
    }
  }
}

Copied copied_from(const void* map, const std::int32_t* place, int rank) {
  Copied copied{.map = tensor_map(map)};
  if (copied.map.rank != rank) fail("a tensor map of another rank than the copy");
  std::memcpy(copied.place, place, static_cast<std::size_t>(rank) * sizeof *place);
  return copied;
}

std::uint32_t box_bytes(const TensorMap& map) {
  std::uint32_t bytes = static_cast<std::uint32_t>(map.element_bytes);
  for (int dim = 0; dim < map.rank; ++dim) bytes *= map.box[dim];
  return bytes;
}

void check_shared(const void* shared, std::uint32_t bytes, std::uint32_t alignment) {
  const std::uint32_t address = shared_address(shared);
  if (address % alignment != 0) fail("a bulk copy at an address of shared memory that is not aligned");
  shared_pointer(address, bytes);
}

void load(std::byte* to, std::uint32_t shared, const Copied& copied, std::uint64_t* barrier) {
  const auto width = static_cast<std::size_t>(copied.map.element_bytes);
  for_each_element(copied, shared, [&](std::size_t offset, const std::byte* from) {
    if (from != nullptr) {
      std::memcpy(to + offset, from, width);
    } else {
      std::memset(to + offset, 0, width);
    }
  });
  mbarrier_complete(barrier, box_bytes(copied.map));
}

}  // namespace

void load_box(void* to_shared, const void* map, std::uint64_t* barrier, const std::int32_t* place, int rank) {
  const Copied copied = copied_from(map, place, rank);
  check_shared(to_shared, box_bytes(copied.map), 128);
  const std::uint32_t shared = shared_address(to_shared);
  if (races::enabled) {
    races::set_place(__builtin_return_address(0));
    const auto width = static_cast<std::size_t>(copied.map.element_bytes);
    for_each_element(copied, shared, [&](std::size_t, const std::byte* from) {
      if (from != nullptr) races::read_by_copy(from, width, barrier);
    });
    races::write_by_copy(to_shared, box_bytes(copied.map), barrier);
  }
  do_later([=] { load(static_cast<std::byte*>(to_shared), shared, copied, barrier); });
}

void load_box_to_pair(void* to_shared, const void* map, std::uint64_t* barrier, const std::int32_t* place,
                      int rank) {
  const Copied copied = copied_from(map, place, rank);
  check_shared(to_shared, box_bytes(copied.map), 128);
  const std::uint32_t shared = shared_address(to_shared);
  for (unsigned of = 0; of < 2; ++of) {
    const unsigned block = block_index.x / 2 * 2 + of;
    std::byte* to = shared_pointer_in(block, to_shared);
    auto* there = reinterpret_cast<std::uint64_t*>(shared_pointer_in(block, barrier));
    do_later([=] { load(to, shared, copied, there); });
  }
}

void store_box(const void* map, const void* from_shared, const std::int32_t* place, int rank) {
  const Copied copied = copied_from(map, place, rank);
  check_shared(from_shared, box_bytes(copied.map), 128);
  const std::uint32_t shared = shared_address(from_shared);
  if (races::enabled) {
    races::set_place(__builtin_return_address(0));
    const auto width = static_cast<std::size_t>(copied.map.element_bytes);
    races::read_by_store(from_shared, box_bytes(copied.map), self->stores.committed);
    for_each_element(copied, shared, [&](std::size_t, const std::byte* to) {
      if (to != nullptr) races::write_by_store(to, width, self->stores.committed, false);
    });
  }
  ask(self->stores, [=] {
    const auto width = static_cast<std::size_t>(copied.map.element_bytes);
    for_each_element(copied, shared, [&](std::size_t offset, const std::byte* to) {
      if (to != nullptr) {
        std::memcpy(const_cast<std::byte*>(to), static_cast<const std::byte*>(from_shared) + offset, width);
      }
    });
  });
}

void load_bytes(void* to_shared, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    fail("cp.async.bulk of odd addresses or bytes");
  }
  check_shared(to_shared, bytes, 16);
  races::set_place(__builtin_return_address(0));
  races::read_by_copy(from, bytes, barrier);
  races::write_by_copy(to_shared, bytes, barrier);
  do_later([=] {
    std::memcpy(to_shared, from, bytes);
    mbarrier_complete(barrier, bytes);
  });
}

// Tensor cores.

namespace {

float half_number(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -tiny : tiny;
}

float number(std::uint16_t bits, bool bf16) {
  static const std::vector<float> halves = [] {
    std::vector<float> all(65536);
    for (std::uint32_t n = 0; n < all.size(); ++n) all[n] = half_number(n);
    return all;
  }();
  return bf16 ? std::bit_cast<float>(std::uint32_t{bits} << 16) : halves[bits];
}

// The address of element (m, k) of an operand tile, where m is a row of A or a column of B.
const std::byte* place_of_element(std::uint64_t tile, bool turned, int m, int k) {
  const auto first = static_cast<std::uint32_t>(tile & 0x3FFF) << 4;
  const auto panels = static_cast<std::uint32_t>(tile >> 16 & 0x3FFF) << 4;
  const auto eights = static_cast<std::uint32_t>(tile >> 32 & 0x3FFF) << 4;
  const auto row = static_cast<std::uint32_t>(turned ? k : m),
             column = static_cast<std::uint32_t>(turned ? m : k);
  const std::uint32_t address =
      first + column / 64 * panels + row / 8 * eights + row % 8 * 128 + column % 64 * 2;
  return shared_pointer(static_cast<std::uint32_t>(swizzled(address, 128)), 2);
}
float element(std::uint64_t tile, bool turned, int m, int k, bool bf16) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, place_of_element(tile, turned, m, k), 2);
  return number(bits, bf16);
}

// Calls body(m, address) for every 16 bytes of an operand tile with `rows` rows of A or columns of B, and K
// = 16.
template <typename Body>
void for_each_16_bytes(std::uint64_t tile, bool turned, int rows, const Body& body) {
  for (int m = 0; m < rows; m += turned ? 8 : 1) {
    for (int k = 0; k < 16; k += turned ? 1 : 8) body(m, place_of_element(tile, turned, m, k));
  }
}

// Reports the reads of a product to the race detector: each warp reads its own 16 rows of A and all of B.
void watch_product(const Warpgroup::Asked& asked, std::uint64_t number) {
  const Product& of = asked.of[0];
  if (!of.a_in_registers) {
    for_each_16_bytes(of.a_tile, of.turned_a, 64, [&](int m, const std::byte* at) {
      races::read_by_product(asked.clocks, m / 16, at, 16, number);
    });
  }
  for_each_16_bytes(of.b_tile, of.turned_b, of.n, [&](int, const std::byte* at) {
    for (int warp = 0; warp < 4; ++warp) races::read_by_product(asked.clocks, warp, at, 16, number);
  });
}

void multiply_all(const std::array<Product, 128>& of) {
  const Product& first = of[0];
  const int n = first.n;
  static thread_local float a[64][16], b[16][256], c[64][256];
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < 16; ++k) {
      if (first.a_in_registers) {
        const Product& lane = of[static_cast<std::size_t>(m / 16 * 32 + m % 8 * 4 + k % 8 / 2)];
        const std::uint32_t two = lane.a[(m % 16 / 8) + 2 * (k / 8)];
        a[m][k] = number(static_cast<std::uint16_t>(two >> (16 * (k % 2))), first.bf16);
      } else {
        a[m][k] = element(first.a_tile, first.turned_a, m, k, first.bf16);
      }
    }
  }
  for (int j = 0; j < n; ++j) {
    for (int k = 0; k < 16; ++k) b[k][j] = element(first.b_tile, first.turned_b, j, k, first.bf16);
  }
  for (int m = 0; m < 64; ++m) {
    for (int j = 0; j < n; ++j) c[m][j] = 0;
    for (int k = 0; k < 16; ++k) {
      const float factor = a[m][k];
      for (int j = 0; j < n; ++j) c[m][j] += factor * b[k][j];
    }
  }
  for (std::size_t t = 0; t < 128; ++t) {
    const Product& lane = of[t];
    for (int i = 0; i < n / 2; ++i) {
      const std::size_t row = t / 32 * 16 + t % 32 / 4 + static_cast<std::size_t>(i % 4 / 2 * 8);
      const std::size_t column = static_cast<std::size_t>(i / 4 * 8 + i % 2) + t % 4 * 2;
      lane.c[i] = (first.add ? lane.c[i] : 0.0f) + c[row][column];
    }
  }
}

void run_products(Warpgroup& group, std::uint64_t until) {
  for (; group.first < until; ++group.first) {
    multiply_all(group.asked.front().of);
    group.asked.pop_front();
  }
}

}  // namespace

void multiply_by_warp(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], bool bf16) {
  const std::uint32_t own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  constexpr std::size_t results = 32;  // offset of the results, after the operands of a lane
  const std::byte* all = meet(~0u, own, sizeof own, [&](std::byte(&slots)[32][most_bytes]) {
    float rows[16][16], columns[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      std::uint16_t of[12];
      std::memcpy(of, slots[lane], sizeof of);
      const int g = lane / 4, t = lane % 4;
      for (int n = 0; n < 8; ++n) rows[g + n % 4 / 2 * 8][n / 4 * 8 + 2 * t + n % 2] = number(of[n], bf16);
      for (int n = 0; n < 4; ++n) columns[n / 2 * 8 + 2 * t + n % 2][g] = number(of[8 + n], bf16);
    }
    float sums[16][8] = {};
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) sums[m][n] += rows[m][k] * columns[k][n];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      std::memcpy(slots[lane] + results, &sums[g][2 * t], 8);
      std::memcpy(slots[lane] + results + 8, &sums[g + 8][2 * t], 8);
    }
  });
  float sums[4];
  std::memcpy(sums, all + static_cast<std::size_t>(self->lane) * most_bytes + results, sizeof sums);
  for (int n = 0; n < 4; ++n) c[n] += sums[n];
}

void multiply(const Product& own) {
  Thread& thread = *self;
  Warpgroup& group = block_of(self).warpgroups[static_cast<std::size_t>(thread.warp->warpgroup)];
  const std::uint64_t place = thread.products++ - group.first;
  while (group.asked.size() <= place) group.asked.emplace_back();
  Warpgroup::Asked& asked = group.asked[place];
  asked.of[thread.index.x % 128] = own;
  if (asked.arrived > 0) {
    for (std::size_t n = 0; n < 128; ++n) {
      const Product& other = asked.of[n];
      if (other.c != nullptr &&
          (other.n != own.n || other.b_tile != own.b_tile || other.a_tile != own.a_tile ||
           other.add != own.add || other.a_in_registers != own.a_in_registers)) {
        fail("wgmma with operands that differ within the warpgroup");
      }
    }
  }
  races::ask(asked.clocks);
  if (++asked.arrived == 128 && races::enabled) {
    races::set_place(__builtin_return_address(0));
    watch_product(asked, group.first + place);
  }
  if (asked.arrived == 128 && !late()) run_products(group, group.first + place + 1);
}

void commit_products() { self->product_groups.push_back(self->products); }

void wait_products(int groups) {
  Thread& thread = *self;
  const auto committed = static_cast<std::int64_t>(thread.product_groups.size());
  if (committed <= groups) return;
  const std::uint64_t until = thread.product_groups[static_cast<std::size_t>(committed - groups - 1)];
  Warpgroup& group = block_of(self).warpgroups[static_cast<std::size_t>(thread.warp->warpgroup)];
  wait_for(
      [&] {
        return group.first >= until ||
               (group.asked.size() >= until - group.first &&
                group.asked[static_cast<std::size_t>(until - group.first - 1)].arrived == 128);
      },
      "wgmma of its warpgroup");
  run_products(group, until);
  races::products_done(until);
}

}  // namespace tilewise::emulator
