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

// What the race detector knows: clocks of threads, the last accesses to each place in memory, and kernels
// that may still run.

namespace tilewise::emulator::races {

using Times = std::vector<std::uint32_t>;
constexpr std::uint32_t under_way = ~0u;  // the time of what a thread has not waited for
constexpr std::size_t most_mbarriers = 96;
constexpr std::size_t granule = 2;  // bytes a cell

inline void join(Times& a, const Times& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (std::size_t n = 0; n < b.size(); ++n) a[n] = std::max(a[n], b[n]);
}

// What is known of other blocks of the grid.
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
  Times seen;    // by slot: a thread, a warp's wgmma, the kernel ahead, an mbarrier's copies
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

// An access: when, by whom, and where in the code.
struct Access {
  std::uint32_t time = 0;  // 0: none
  std::uint32_t place = 0;
  std::uint16_t slot = 0;
  bool atomic = false;
  std::uint8_t halves = 3;  // which bytes of the cell
};

struct Cell {
  Access write;
  Access same[2];  // writes of what was there already, by others
  Access reads[4];
  int count = 0;
  std::uint32_t block_count = 0;  // how many blocks this operating system's thread had run
  std::unique_ptr<Times> many;    // by slot, where there are more than four
  std::uint32_t place_of_many = 0;
};

struct GlobalAccess : Access {
  std::uint32_t launch = 0, block = 0;
};
struct GlobalCell {
  GlobalAccess write;
  GlobalAccess reads[2];  // the first and the last by other than that one
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
  std::uint32_t phases = 0;  // that are over
  Access init;
  Sync sync;
};

struct LaunchState {
  std::uint32_t id = 0;
  std::string name;
  bool early = false, waited = false, triggered_before_waiting = false;
  std::set<std::uint32_t> before_waiting, after_waiting;  // launches that may still run
};

struct ThreadClock {
  Clock clock;
  SharedOthers released;  // by the last fence
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

  std::size_t slot_of_kernel_ahead() const { return thread_count + warp_count; }
  std::size_t first_mbarrier() const { return thread_count + warp_count + 1; }
  std::size_t slots() const { return first_mbarrier() + most_mbarriers; }
};

// Of all blocks, which rarely run at the same time.
extern std::recursive_mutex lock;
extern std::map<std::uintptr_t, BlockClock*> blocks;  // that run, by their dynamic shared memory
extern std::unordered_map<std::uintptr_t, Others> flags;
extern LaunchState* launch;
extern std::string found_text;  // the first race of the launch

// Of the block that runs on this thread of the operating system.
extern thread_local BlockClock* current;
extern thread_local std::uint32_t place;  // in the code, of what is done now

// memory.cpp

/// The clock of the thread that runs. What it wrote before is looked at first.
ThreadClock& own();
inline std::uint32_t& own_time() { return own().clock.seen[self->index.x]; }
/// An access of the thread that runs, now.
Access by_thread();

struct How {
  bool writes = false, atomic = false, async = false;
};
/// Compares with earlier accesses by what `clock` knows, and records `access`.
void access_bytes(const void* data, std::size_t bytes, const How& how, Access access, const Clock& clock);
/// The same of the thread that runs, where it is memory of the device.
void accessed(const void* data, std::size_t bytes, const How& how, const void* return_address);
bool watches(const void* data);
bool knows(const Clock& clock, const Access& access, bool async);
void conflict(const Clock& clock, const Access& earlier, bool earlier_writes, const Access& later,
              bool later_writes, std::uintptr_t at, bool async);
void settle_write();
/// Null where it is not shared memory of the block, or of no allocation.
Cell* shared_cell(std::uintptr_t at);
Allocation* allocation_of(std::uintptr_t at);
/// Cells for a block that begins.
void begin_cells(BlockClock& block);

// report.cpp

std::uint32_t place_of(const void* return_address);
std::string name_of(const BlockClock& block, std::size_t slot);
void report(const std::string& what, std::uint32_t earlier, std::uint32_t later,
            const std::string& earlier_by, const std::string& later_by);

}  // namespace tilewise::emulator::races
