#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator.h"
#include "races/races.h"

// The state of the race detector: the clocks of threads, the last accesses to each cell of memory, and the
// kernels that may still run.

namespace tilewise::emulator::races {

using Times = std::vector<std::uint32_t>;
constexpr std::uint32_t under_way = ~0u;  // the time of an operation for which its thread has not waited yet
constexpr std::size_t most_mbarriers = 96;
constexpr std::size_t granule = 2;  // bytes per cell

inline void join(Times& a, const Times& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (std::size_t n = 0; n < b.size(); ++n) a[n] = std::max(a[n], b[n]);
}

// The known times of other blocks of the grid.
using Others = std::map<unsigned, Times>;
using SharedOthers = std::shared_ptr<const Others>;

inline void join(Others& a, const Others& b) {
  for (const auto& [block, times] : b) join(a[block], times);
}
inline void join(SharedOthers& a, const SharedOthers& b) {
  if (b == nullptr || a == b) return;
  if (a == nullptr) {
    a = b;
    return;
  }
  auto both = std::make_shared<Others>(*a);
  join(*both, *b);
  a = std::move(both);
}

struct Clock {
  Times seen;    // per slot: a thread, the wgmma of a warp, the previous kernel, the copies of an mbarrier
  Times fenced;  // the same for the async proxy
  SharedOthers others;

  void join(const Clock& other) {
    races::join(seen, other.seen);
    races::join(fenced, other.fenced);
    races::join(others, other.others);
  }
};

struct Sync {
  Clock gathered, complete;
};

// An access: its time, its slot, and its place in the code.
struct Access {
  std::uint32_t time = 0;  // 0: none
  std::uint32_t place = 0;
  std::uint16_t slot = 0;
  bool atomic = false;
  std::uint8_t halves = 3;  // which bytes of the cell
};

struct Cell {
  Access write;
  Access same[2];  // writes of the same value by other threads
  Access reads[4];
  int count = 0;
  std::uint32_t block_count = 0;  // the number of blocks that this worker had started
  std::unique_ptr<Times> many;    // the times of reads per slot, if there are more than four
  std::uint32_t place_of_many = 0;
};

struct GlobalAccess : Access {
  std::uint32_t launch = 0, block = 0;
};
struct GlobalCell {
  GlobalAccess write;
  GlobalAccess reads[2];  // the first read, and the last one by another block
};

struct Allocation {
  static constexpr std::size_t page_cells = 2048;
  std::uintptr_t begin = 0, end = 0;
  std::vector<std::unique_ptr<GlobalCell[]>> pages;

  GlobalCell& cell(std::uintptr_t at) {
    const std::size_t index = (at - begin) / granule;
    auto& page = pages[index / page_cells];
    if (page == nullptr) page = std::make_unique<GlobalCell[]>(page_cells);
    return page[index % page_cells];
  }
};

struct Range {
  std::uintptr_t begin;
  std::size_t bytes;
  std::uint64_t group;
};

struct Mbarrier {
  std::uint16_t slot = 0;
  std::uint32_t phases = 0;  // phases that have ended
  Access init;
  Sync sync;
};

struct LaunchState {
  std::uint32_t id = 0;
  std::string name;
  bool early = false, waited = false, triggered_before_waiting = false;
  std::set<std::uint32_t> before_waiting, after_waiting;  // earlier launches that may still run
};

struct ThreadClock {
  Clock clock;
  SharedOthers released;  // at the last fence
  Others to_acquire;      // at the next fence
  std::deque<Range> copies, store_reads, store_writes;
};

struct BlockClock {
  unsigned number = 0;
  std::uintptr_t dynamic = 0;
  std::size_t dynamic_bytes = 0, thread_count = 0, warp_count = 0;
  std::vector<ThreadClock> threads;
  std::uintptr_t statics = 0;
  std::map<const void*, Mbarrier> mbarriers;

  std::size_t slot_of_previous_kernel() const { return thread_count + warp_count; }
  std::size_t first_mbarrier() const { return thread_count + warp_count + 1; }
  std::size_t slots() const { return first_mbarrier() + most_mbarriers; }
};

// Shared by all blocks, which rarely run at the same time.
extern std::recursive_mutex lock;
extern std::map<std::uintptr_t, BlockClock*> blocks;  // running ones, by their dynamic shared memory
extern std::unordered_map<std::uintptr_t, Others> flags;
extern LaunchState* launch;
extern std::string found_text;  // the first race of the launch

// For the block that runs on this thread of the operating system.
extern thread_local BlockClock* current;
extern thread_local std::uint32_t place;  // the place in the code of the current access

// memory.cpp

/// The clock of the running thread. First examines its last write.
ThreadClock& own();
inline std::uint32_t& own_time() { return own().clock.seen[self->index.x]; }
/// An access by the running thread at its current time.
Access by_thread();

struct How {
  bool writes = false, atomic = false, async = false;
};
/// Compares an access with earlier ones by means of `clock`, and records it.
void access_bytes(const void* data, std::size_t bytes, const How& how, Access access, const Clock& clock);
/// The same for an access by the running thread, if it is to device memory.
void accessed(const void* data, std::size_t bytes, const How& how, const void* return_address);
bool watches(const void* data);
bool knows(const Clock& clock, const Access& access, bool async);
void conflict(const Clock& clock, const Access& earlier, bool earlier_writes, const Access& later,
              bool later_writes, std::uintptr_t at, bool async);
void settle_write();
/// Null if the address is not in shared memory of the block, or in no allocation.
Cell* shared_cell(std::uintptr_t at);
Allocation* allocation_of(std::uintptr_t at);
/// Prepares the cells of a block that starts.
void begin_cells(BlockClock& block);

// report.cpp

std::uint32_t place_of(const void* return_address);
std::string name_of(const BlockClock& block, std::size_t slot);
void report(const std::string& what, std::uint32_t earlier, std::uint32_t later,
            const std::string& earlier_by, const std::string& later_by);

}  // namespace tilewise::emulator::races
