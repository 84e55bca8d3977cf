#include "races.h"

#include <link.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator.h"

namespace tilewise::emulator::races {

namespace {

using Times = std::vector<std::uint32_t>;
constexpr std::uint32_t under_way = ~0u;  // the time of what a thread has not waited for
constexpr std::size_t most_mbarriers = 96;
constexpr std::size_t granule = 2;  // bytes a cell

void join(Times& a, const Times& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (std::size_t n = 0; n < b.size(); ++n) a[n] = std::max(a[n], b[n]);
}

// What is known of other blocks of the grid.
using Others = std::map<unsigned, Times>;
using SharedOthers = std::shared_ptr<const Others>;

void join(Others& a, const Others& b) {
  for (const auto& [block, times] : b) join(a[block], times);
}
void join(SharedOthers& a, const SharedOthers& b) {
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

}  // namespace

struct Sync {
  Clock gathered, complete;
};

namespace {

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

}  // namespace

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

namespace {

std::recursive_mutex lock;  // of all below; blocks rarely run at the same time
std::map<std::uintptr_t, Allocation>& allocations() {
  static std::map<std::uintptr_t, Allocation> all;
  return all;
}
std::map<void*, LaunchState>& streams() {
  static std::map<void*, LaunchState> all;
  return all;
}
std::map<std::uintptr_t, BlockClock*> blocks;  // that run, by their dynamic shared memory
std::unordered_map<std::uintptr_t, Others> flags;
LaunchState* launch = nullptr;
std::uint32_t launches = 0;
std::string found_text;
std::set<std::pair<std::uint32_t, std::uint32_t>> reported;

thread_local BlockClock* current = nullptr;
thread_local std::uint32_t place = 0;
thread_local Allocation* last_allocation = nullptr;

std::uintptr_t base_of_program() {
  static const std::uintptr_t base = [] {
    std::uintptr_t found = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* to) {
          *static_cast<std::uintptr_t*>(to) = info->dlpi_addr;
          return 1;
        },
        &found);
    return found;
  }();
  return base;
}

std::uint32_t place_of(const void* return_address) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(return_address) - base_of_program() - 1);
}

// Lines of the sources, innermost first.
std::string lines_of(std::uint32_t where) {
  char command[96];
  std::snprintf(command, sizeof command, "addr2line -ise /proc/%d/exe 0x%x", static_cast<int>(getpid()),
                where);
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[512];
    for (int n = 0; n < 5 && std::fgets(line, sizeof line, pipe) != nullptr; ++n)
      text += std::string("      ") + line;
    pclose(pipe);
  }
  return text;
}

std::string name_of(const BlockClock& block, std::size_t slot) {
  if (slot < block.thread_count) return "thread " + std::to_string(slot);
  if (slot < block.thread_count + block.warp_count) {
    return "wgmma of warp " + std::to_string(slot - block.thread_count);
  }
  return "a bulk copy";
}

void report(const std::string& what, std::uint32_t earlier, std::uint32_t later,
            const std::string& earlier_by, const std::string& later_by) {
  if (!reported.insert({earlier, later}).second) {
    if (found_text.empty()) found_text = "a race that was reported before";
    return;
  }
  const std::string title = "race: " + what;
  if (found_text.empty()) found_text = title;
  if (reported.size() > 40) return;
  std::fprintf(stderr, "%s: %s\n    %s\n%s    after %s\n%s", launch == nullptr ? "" : launch->name.c_str(),
               title.c_str(), later_by.c_str(), lines_of(later).c_str(), earlier_by.c_str(),
               lines_of(earlier).c_str());
}

void settle_write();

// The thread of the block that does something now.
ThreadClock& own() {
  settle_write();
  return current->threads[self->index.x];
}
std::uint32_t& own_time() { return own().clock.seen[self->index.x]; }

bool knows(const Clock& clock, const Access& access, bool async) {
  if (access.time == under_way) return false;
  const Times& times = async && access.slot < current->thread_count ? clock.fenced : clock.seen;
  return times[access.slot] >= access.time;
}

bool knows_a_write(const Clock& clock, const Cell& cell, bool async) {
  if (knows(clock, cell.write, async)) return true;
  return std::any_of(std::begin(cell.same), std::end(cell.same),
                     [&](const Access& one) { return one.time != 0 && knows(clock, one, async); });
}

std::string shared_name(std::uintptr_t at) {
  if (at - current->dynamic < current->dynamic_bytes) {
    return "shared memory at " + std::to_string(at - current->dynamic);
  }
  return "static shared memory";
}

void conflict(const Clock& clock, const Access& earlier, bool earlier_writes, const Access& later,
              bool later_writes, std::uintptr_t at, bool async) {
  const bool fence = async && earlier.time != under_way && clock.seen[earlier.slot] >= earlier.time;
  const std::string what = shared_name(at) + (earlier.time == under_way ? ", before a wait for it"
                                              : fence                   ? ", without the async proxy's fence"
                                                                        : "");
  report(what, earlier.place, later.place,
         name_of(*current, earlier.slot) + (earlier_writes ? " wrote" : " read"),
         "block " + std::to_string(current->number) + ", " + name_of(*current, later.slot) +
             (later_writes ? " writes" : " reads"));
}

void read_cell(Cell& cell, const Clock& clock, const Access& access, std::uintptr_t at, bool async) {
  const Access& write = cell.write;
  if (write.time != 0 && !(write.atomic && access.atomic) && (write.halves & access.halves) != 0 &&
      !knows_a_write(clock, cell, async)) {
    conflict(clock, write, true, access, false, at, async);
  }
  if (write.time == 0 && access.slot >= current->thread_count) return;  // a product of nothing, of no use
  if (cell.many != nullptr) {
    (*cell.many)[access.slot] = access.time;
    cell.place_of_many = access.place;
    return;
  }
  for (int n = 0; n < cell.count;) {
    if (cell.reads[n].slot == access.slot && cell.reads[n].time != under_way) {
      cell.reads[n] = access;
      return;
    }
    if (knows(clock, cell.reads[n], false)) {
      cell.reads[n] = cell.reads[--cell.count];
    } else {
      ++n;
    }
  }
  if (cell.count < 4) {
    cell.reads[cell.count++] = access;
    return;
  }
  cell.many = std::make_unique<Times>(current->slots());
  for (const Access& read : cell.reads) (*cell.many)[read.slot] = read.time;
  (*cell.many)[access.slot] = access.time;
  cell.place_of_many = access.place;
  cell.count = 0;
}

void write_cell(Cell& cell, const Clock& clock, const Access& access, std::uintptr_t at, bool async) {
  const Access& write = cell.write;
  if (write.time != 0 && !(write.atomic && access.atomic) && (write.halves & access.halves) != 0 &&
      !knows_a_write(clock, cell, async)) {
    conflict(clock, write, true, access, true, at, async);
  }
  for (int n = 0; n < cell.count; ++n) {
    const Access& read = cell.reads[n];
    if (!(read.atomic && access.atomic) && (read.halves & access.halves) != 0 && !knows(clock, read, false)) {
      conflict(clock, read, false, access, true, at, false);
    }
  }
  if (cell.many != nullptr) {
    for (std::size_t slot = 0; slot < cell.many->size(); ++slot) {
      const Access read{
          .time = (*cell.many)[slot], .place = cell.place_of_many, .slot = static_cast<std::uint16_t>(slot)};
      if (read.time != 0 && !knows(clock, read, false)) {
        conflict(clock, read, false, access, true, at, false);
        break;
      }
    }
    cell.many.reset();
  }
  cell.count = 0;
  cell.write = access;
  cell.same[0] = cell.same[1] = {};
}

// Cells of the block that runs, kept for the next one.
struct Cells {
  std::vector<Cell> dynamic, statics;
  std::uint32_t blocks = 0;
};
thread_local Cells cells;

Cell* shared_cell(std::uintptr_t at) {
  Cell* cell = nullptr;
  if (at - current->dynamic < current->dynamic_bytes) {
    cell = &cells.dynamic[(at - current->dynamic) / granule];
  } else if (at >= current->statics && (at - current->statics) / granule < cells.statics.size()) {
    cell = &cells.statics[(at - current->statics) / granule];
  }
  if (cell != nullptr && cell->block_count != cells.blocks) {
    *cell = {};
    cell->block_count = cells.blocks;
  }
  return cell;
}

Allocation* allocation_of(std::uintptr_t at) {
  if (last_allocation != nullptr &&
      at - last_allocation->begin < last_allocation->end - last_allocation->begin) {
    return last_allocation;
  }
  auto next = allocations().upper_bound(at);
  if (next == allocations().begin()) return nullptr;
  Allocation& found = std::prev(next)->second;
  if (at >= found.end) return nullptr;
  return last_allocation = &found;
}

bool knows_global(const Clock& clock, const GlobalAccess& access, bool& kernel_ahead) {
  if (access.launch != launch->id) {
    const bool waited = clock.seen[current->slot_of_kernel_ahead()] != 0;
    const auto& runs = waited ? launch->after_waiting : launch->before_waiting;
    kernel_ahead = runs.contains(access.launch);
    return !kernel_ahead;
  }
  if (access.time == under_way) return false;
  if (access.block == current->number) return clock.seen[access.slot] >= access.time;
  if (clock.others == nullptr) return false;
  const auto found = clock.others->find(access.block);
  return found != clock.others->end() && found->second[access.slot] >= access.time;
}

void global_conflict(const GlobalAccess& earlier, bool earlier_writes, const GlobalAccess& later,
                     bool later_writes, bool kernel_ahead) {
  report(kernel_ahead ? "global memory of the kernel ahead, which may still run" : "global memory",
         earlier.place, later.place,
         (kernel_ahead ? "a kernel ahead, block " : "block ") + std::to_string(earlier.block) + ", " +
             name_of(*current, earlier.slot) + (earlier_writes ? " wrote" : " read"),
         "block " + std::to_string(current->number) + ", " + name_of(*current, later.slot) +
             (later_writes ? " writes" : " reads"));
}

void access_global(GlobalCell& cell, const Clock& clock, const GlobalAccess& access, bool writes) {
  const auto check = [&](const GlobalAccess& earlier, bool earlier_writes) {
    bool ahead = false;
    if (earlier.time != 0 && !(earlier.atomic && access.atomic) && (earlier.halves & access.halves) != 0 &&
        !knows_global(clock, earlier, ahead)) {
      global_conflict(earlier, earlier_writes, access, writes, ahead);
    }
  };
  check(cell.write, true);
  if (writes) {
    for (const GlobalAccess& read : cell.reads) check(read, false);
    cell.reads[0] = cell.reads[1] = {};
    cell.write = access;
    return;
  }
  const bool same = cell.reads[0].launch == access.launch && cell.reads[0].block == access.block;
  if (cell.reads[0].time == 0 || same) {
    cell.reads[0] = access;
  } else {
    cell.reads[1] = access;
  }
}

GlobalAccess global_access(const Access& access) {
  GlobalAccess global;
  static_cast<Access&>(global) = access;
  global.launch = launch->id;
  global.block = current->number;
  return global;
}

// Which bytes of the cell at `at` are in a range.
std::uint8_t halves_of(std::uintptr_t at, std::uintptr_t begin, std::uintptr_t end) {
  return static_cast<std::uint8_t>((at >= begin ? 1 : 0) | (at + 1 >= begin && at + 1 < end ? 2 : 0));
}

struct How {
  bool writes = false, atomic = false, async = false;
};

/// Of the thread that runs, with its clock; `access` as it is to be recorded.
void access_bytes(const void* data, std::size_t bytes, const How& how, Access access, const Clock& clock) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  access.atomic = how.atomic;
  for (std::uintptr_t at = begin / granule * granule; at < begin + bytes; at += granule) {
    access.halves = halves_of(at, begin, begin + bytes);
    if (Cell* cell = shared_cell(at)) {
      how.writes ? write_cell(*cell, clock, access, at, how.async)
                 : read_cell(*cell, clock, access, at, how.async);
      continue;
    }
    Allocation* allocation = allocation_of(at);
    if (allocation == nullptr || launch == nullptr) return;
    access_global(allocation->cell(at), clock, global_access(access), how.writes);
  }
}

Access by_thread() {
  return {.time = own_time(), .place = place, .slot = static_cast<std::uint16_t>(self->index.x)};
}

bool watches(const void* data) {
  if (self == nullptr || current == nullptr) return false;
  // Most accesses are to a thread's own stack.
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const auto stack = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  return at - stack > 0x40000 && stack - at > 0x40000;
}

// A write is looked at once it has been done: threads may write what is there already (zeros past the end of
// a sequence, which several clear), in no order. Who read knows one of them.
struct Unsettled {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::byte before[16] = {};
  Access access;
  const Clock* clock = nullptr;
};
thread_local Unsettled unsettled;

void settle_write() {
  if (unsettled.data == nullptr) return;
  Unsettled write = std::exchange(unsettled, {});
  const std::lock_guard guard(lock);
  if (std::memcmp(write.data, write.before, write.bytes) != 0) {
    access_bytes(write.data, write.bytes, {.writes = true}, write.access, *write.clock);
    return;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(write.data);
  for (std::uintptr_t at = begin / granule * granule; at < begin + write.bytes; at += granule) {
    write.access.halves = halves_of(at, begin, begin + write.bytes);
    Cell* found = shared_cell(at);
    if (found == nullptr) {
      Allocation* allocation = allocation_of(at);
      if (allocation == nullptr || launch == nullptr) return;
      GlobalCell& cell = allocation->cell(at);
      bool ahead = false;
      const bool in_order = cell.write.time == 0 || knows_global(*write.clock, cell.write, ahead);
      if (in_order) access_global(cell, *write.clock, global_access(write.access), true);
      continue;
    }
    Cell& cell = *found;
    if (cell.write.time == 0 || knows(*write.clock, cell.write, false)) {
      cell.write = write.access;
    } else {
      cell.same[cell.same[0].time != 0 && cell.same[0].slot != write.access.slot ? 1 : 0] = write.access;
    }
  }
}

void accessed(const void* data, std::size_t bytes, const How& how, const void* return_address) {
  if (!watches(data)) return;
  const std::lock_guard guard(lock);
  const Clock& clock = own().clock;
  place = place_of(return_address);
  if (how.writes && bytes <= sizeof unsettled.before) {
    const Access access = by_thread();
    unsettled = {
        .data = static_cast<const std::byte*>(data), .bytes = bytes, .access = access, .clock = &clock};
    std::memcpy(unsettled.before, data, bytes);
    return;
  }
  access_bytes(data, bytes, how, by_thread(), clock);
}

SharedOthers published() {
  auto all = own().clock.others == nullptr ? std::make_shared<Others>()
                                           : std::make_shared<Others>(*own().clock.others);
  join((*all)[current->number], own().clock.seen);
  return all;
}
void acquire(const Others& from) {
  if (from.empty()) return;
  Clock& clock = own().clock;
  auto all = clock.others == nullptr ? std::make_shared<Others>() : std::make_shared<Others>(*clock.others);
  for (const auto& [block, times] : from) {
    if (block == current->number) {
      join(clock.seen, times);
    } else {
      join((*all)[block], times);
    }
  }
  clock.others = std::move(all);
}

Mbarrier* mbarrier_of(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto next = blocks.upper_bound(at);
  BlockClock* block = nullptr;
  if (next != blocks.begin()) {
    BlockClock* before = std::prev(next)->second;
    if (at - before->dynamic < before->dynamic_bytes) block = before;
  }
  if (block == nullptr) block = current;  // static shared memory
  if (block == nullptr) return nullptr;
  const auto found = block->mbarriers.find(address);
  return found == block->mbarriers.end() ? nullptr : &found->second;
}
bool is_own(const void* address) { return current != nullptr && current->mbarriers.contains(address); }

}  // namespace

void set_place(const void* return_address) { place = place_of(return_address); }

// Launches, blocks, memory.

void begin_launch(const char* name, void* stream, bool early) {
  const std::lock_guard guard(lock);
  LaunchState& state = streams()[stream];
  const LaunchState ahead = std::exchange(state, {});
  state.id = ++launches;
  state.name = name;
  state.early = early;
  if (early && ahead.id != 0) {
    state.before_waiting = {ahead.id};
    const auto& also = ahead.triggered_before_waiting ? ahead.before_waiting : ahead.after_waiting;
    state.before_waiting.insert(also.begin(), also.end());
    state.after_waiting = ahead.waited || !ahead.early ? ahead.after_waiting : ahead.before_waiting;
  }
  launch = &state;
  flags.clear();
  found_text.clear();
}

const char* end_launch() {
  const std::lock_guard guard(lock);
  launch = nullptr;
  return found_text.empty() ? nullptr : found_text.c_str();
}

void stream_waits(void* stream) {
  const std::lock_guard guard(lock);
  streams().erase(stream);
}

void begin_block(unsigned number, unsigned threads, std::byte* dynamic, std::size_t dynamic_bytes) {
  auto* block = new BlockClock;
  block->number = number;
  block->dynamic = reinterpret_cast<std::uintptr_t>(dynamic);
  block->dynamic_bytes = dynamic_bytes;
  block->thread_count = threads;
  block->warp_count = (threads + 31) / 32;
  ++cells.blocks;
  cells.dynamic.resize(std::max(cells.dynamic.size(), dynamic_bytes / granule + 1));
  // Static shared memory: the thread-local memory of the program.
  struct Found {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
  } found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        for (int n = 0; n < info->dlpi_phnum; ++n) {
          if (info->dlpi_phdr[n].p_type == PT_TLS) {
            *static_cast<Found*>(to) = {reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data),
                                        info->dlpi_phdr[n].p_memsz};
          }
        }
        return 1;
      },
      &found);
  block->statics = found.begin / granule * granule;
  cells.statics.resize(found.bytes / granule + 1);
  block->threads.resize(threads);
  for (unsigned n = 0; n < threads; ++n) {
    Clock& clock = block->threads[n].clock;
    clock.seen.assign(block->slots(), 0);
    clock.fenced.assign(block->slots(), 0);
    clock.seen[n] = 1;
  }
  const std::lock_guard guard(lock);
  if (launch != nullptr && !launch->early) {
    for (ThreadClock& thread : block->threads) thread.clock.seen[block->slot_of_kernel_ahead()] = 1;
  }
  if (dynamic_bytes != 0) blocks[block->dynamic] = block;
  current = block;
}

void end_block() {
  const std::lock_guard guard(lock);
  settle_write();
  blocks.erase(current->dynamic);
  delete current;
  current = nullptr;
}

void allocated(const void* data, std::size_t bytes) {
  const std::lock_guard guard(lock);
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  Allocation& made = allocations()[begin];
  made.begin = begin;
  made.end = begin + bytes;
  made.pages.clear();
  made.pages.resize(bytes / granule / Allocation::page_cells + 1);
}
void freed(const void* data) {
  const std::lock_guard guard(lock);
  last_allocation = nullptr;
  allocations().erase(reinterpret_cast<std::uintptr_t>(data));
}

// Barriers.

void arrive(SyncOwner& sync) {
  if (sync == nullptr) sync = std::make_shared<Sync>();
  sync->gathered.join(own().clock);
  ++own_time();
}
void complete(SyncOwner& sync) {
  if (sync == nullptr) return;
  sync->complete.join(sync->gathered);
  sync->gathered = {};
}
void pass(SyncOwner& sync) { own().clock.join(sync->complete); }

void init(const void* mbarrier) {
  const std::lock_guard guard(lock);
  Mbarrier& made = current->mbarriers[mbarrier];
  if (made.slot == 0) {
    if (current->mbarriers.size() > most_mbarriers)
      fail("more mbarriers than the race detector has room for");
    made.slot = static_cast<std::uint16_t>(current->first_mbarrier() + current->mbarriers.size() - 1);
  }
  made.init = by_thread();
}

namespace {

void check_init(const Mbarrier& mbarrier, bool async) {
  const Clock& clock = own().clock;
  if (knows(clock, mbarrier.init, async)) return;
  conflict(clock, mbarrier.init, true, by_thread(), false, current->dynamic, async);
}

}  // namespace

void arrive_at(const void* address) {
  const std::lock_guard guard(lock);
  if (self == nullptr || !is_own(address)) return;
  Mbarrier& mbarrier = current->mbarriers[address];
  check_init(mbarrier, false);
  mbarrier.sync.gathered.join(own().clock);
  ++own_time();
}
void phase_over(const void* address) {
  const std::lock_guard guard(lock);
  Mbarrier* mbarrier = mbarrier_of(address);
  if (mbarrier == nullptr) return;
  Clock& complete = mbarrier->sync.complete;
  complete.join(mbarrier->sync.gathered);
  mbarrier->sync.gathered = {};
  if (complete.seen.size() <= mbarrier->slot) complete.seen.resize(mbarrier->slot + std::size_t{1});
  complete.seen[mbarrier->slot] = ++mbarrier->phases;
}
void waited_for(const void* address) {
  const std::lock_guard guard(lock);
  if (!is_own(address)) return;
  const Mbarrier& mbarrier = current->mbarriers[address];
  check_init(mbarrier, false);
  own().clock.join(mbarrier.sync.complete);
}

// Fences and flags.

void fence_async_proxy() {
  Clock& clock = own().clock;
  clock.fenced = clock.seen;
  ++own_time();
}
void fence_device() {
  const std::lock_guard guard(lock);
  acquire(own().to_acquire);
  own().to_acquire.clear();
  own().released = published();
  ++own_time();
}
void raise(const void* flag) {
  const std::lock_guard guard(lock);
  join(flags[reinterpret_cast<std::uintptr_t>(flag)], *published());
  ++own_time();
}
void found(const void* flag) {
  const std::lock_guard guard(lock);
  acquire(flags[reinterpret_cast<std::uintptr_t>(flag)]);
}
void waited_for_kernel_ahead() {
  const std::lock_guard guard(lock);
  launch->waited = true;
  own().clock.seen[current->slot_of_kernel_ahead()] = 1;
}
void let_kernel_behind_begin() {
  const std::lock_guard guard(lock);
  if (own().clock.seen[current->slot_of_kernel_ahead()] == 0) launch->triggered_before_waiting = true;
}

// What the hardware does.

namespace {

// Over when the phase is in which its bytes arrive.
Access by_copy(const Mbarrier& mbarrier) {
  Access access = by_thread();
  access.slot = mbarrier.slot;
  access.time = mbarrier.phases + 1;
  return access;
}

}  // namespace

void read_by_copy(const void* from, std::size_t bytes, const void* address) {
  const std::lock_guard guard(lock);
  const bool bulk = address != nullptr && is_own(address);
  access_bytes(from, bytes, {}, bulk ? by_copy(current->mbarriers[address]) : by_thread(), own().clock);
}
void write_by_copy(const void* to, std::size_t bytes, const void* address) {
  const std::lock_guard guard(lock);
  if (!is_own(address)) return;
  const Mbarrier& mbarrier = current->mbarriers[address];
  check_init(mbarrier, true);
  access_bytes(to, bytes, {.writes = true, .async = true}, by_copy(mbarrier), own().clock);
}

void write_by_async_copy(const void* to, std::size_t bytes, std::uint64_t group) {
  const std::lock_guard guard(lock);
  Access access = by_thread();
  access.time = under_way;
  access_bytes(to, bytes, {.writes = true}, access, own().clock);
  own().copies.push_back({reinterpret_cast<std::uintptr_t>(to), bytes, group});
}
void read_by_store(const void* from, std::size_t bytes, std::uint64_t group) {
  const std::lock_guard guard(lock);
  Access access = by_thread();
  access.time = under_way;
  access_bytes(from, bytes, {.async = true}, access, own().clock);
  own().store_reads.push_back({reinterpret_cast<std::uintptr_t>(from), bytes, group});
}
void write_by_store(const void* to, std::size_t bytes, std::uint64_t group, bool adds) {
  const std::lock_guard guard(lock);
  Access access = by_thread();
  access.time = under_way;
  access_bytes(to, bytes, {.writes = true, .atomic = adds}, access, own().clock);
  own().store_writes.push_back({reinterpret_cast<std::uintptr_t>(to), bytes, group});
}

namespace {

// Calls body(address) for each cell of the ranges of groups that are done, which leave the list.
template <typename Body>
void finish(std::deque<Range>& ranges, std::uint64_t first_under_way, const Body& body) {
  const std::lock_guard guard(lock);
  for (; !ranges.empty() && ranges.front().group < first_under_way; ranges.pop_front()) {
    const Range& range = ranges.front();
    for (std::uintptr_t at = range.begin / granule * granule; at < range.begin + range.bytes; at += granule)
      body(at);
  }
}

}  // namespace

void async_copies_done(std::uint64_t first_under_way) {
  finish(own().copies, first_under_way, [&](std::uintptr_t at) {
    Cell* cell = shared_cell(at);
    if (cell != nullptr && cell->write.slot == self->index.x && cell->write.time == under_way) {
      cell->write.time = own_time();
    }
  });
}
void stores_read(std::uint64_t first_under_way) {
  finish(own().store_reads, first_under_way, [&](std::uintptr_t at) {
    Cell* cell = shared_cell(at);
    if (cell == nullptr) return;
    for (int n = 0; n < cell->count; ++n) {
      Access& read = cell->reads[n];
      if (read.slot == self->index.x && read.time == under_way) read.time = own_time();
    }
    if (cell->many != nullptr && (*cell->many)[self->index.x] == under_way) {
      (*cell->many)[self->index.x] = own_time();
    }
  });
}
void stores_done(std::uint64_t first_under_way) {
  stores_read(first_under_way);
  finish(own().store_writes, first_under_way, [&](std::uintptr_t at) {
    Allocation* allocation = allocation_of(at);
    if (allocation == nullptr) return;
    GlobalAccess& write = allocation->cell(at).write;
    if (write.slot == self->index.x && write.block == current->number && write.time == under_way) {
      write.time = own_time();
    }
  });
}
void end_thread() { stores_done(~std::uint64_t{0}); }

void ask(Asked& asked) {
  auto& of_warp = asked.by_warp[self->index.x / 32 % 4];
  if (of_warp == nullptr) of_warp = std::make_shared<Clock>();
  static_cast<Clock*>(of_warp.get())->join(own().clock);
}
void read_by_product(const Asked& asked, int warp, const void* from, std::size_t bytes,
                     std::uint64_t product) {
  const std::lock_guard guard(lock);
  Access access = by_thread();
  const std::size_t first_warp = self->index.x / 128 * 4;
  access.slot =
      static_cast<std::uint16_t>(current->thread_count + first_warp + static_cast<std::size_t>(warp));
  access.time = static_cast<std::uint32_t>(product + 1);
  access_bytes(from, bytes, {.async = true}, access, *static_cast<const Clock*>(asked.by_warp[warp].get()));
}
void products_done(std::uint64_t count) {
  std::uint32_t& seen = own().clock.seen[current->thread_count + self->index.x / 32];
  seen = std::max(seen, static_cast<std::uint32_t>(count));
}

namespace {

template <bool writes, bool reads>
void atomic_access(const void* data, std::size_t bytes, const void* return_address) {
  if (!watches(data)) return;
  const std::lock_guard guard(lock);
  place = place_of(return_address);
  access_bytes(data, bytes, {.writes = writes, .atomic = true}, by_thread(), own().clock);
  if (shared_cell(reinterpret_cast<std::uintptr_t>(data)) != nullptr) return;
  auto& flag = flags[reinterpret_cast<std::uintptr_t>(data)];
  if (reads) join(own().to_acquire, flag);
  if (writes && own().released != nullptr) join(flag, *own().released);
}

}  // namespace
}  // namespace tilewise::emulator::races

// What code compiled with -fsanitize=thread calls.

using namespace tilewise::emulator::races;

#define TILEWISE_HERE __builtin_return_address(0)
#define TILEWISE_ACCESSES(bytes)                                                                         \
  void __tsan_read##bytes(void* at) { accessed(at, bytes, {}, TILEWISE_HERE); }                          \
  void __tsan_write##bytes(void* at) { accessed(at, bytes, {.writes = true}, TILEWISE_HERE); }           \
  void __tsan_unaligned_read##bytes(void* at) { accessed(at, bytes, {}, TILEWISE_HERE); }                \
  void __tsan_unaligned_write##bytes(void* at) { accessed(at, bytes, {.writes = true}, TILEWISE_HERE); } \
  void __tsan_volatile_read##bytes(void* at) { atomic_access<false, true>(at, bytes, TILEWISE_HERE); }   \
  void __tsan_volatile_write##bytes(void* at) { atomic_access<true, false>(at, bytes, TILEWISE_HERE); }

#define TILEWISE_FETCH(bits, T, name)                                       \
  T __tsan_atomic##bits##_fetch_##name(volatile T* at, T value, int) {      \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE); \
    return __atomic_fetch_##name(at, value, __ATOMIC_SEQ_CST);              \
  }
#define TILEWISE_ATOMICS(bits, T)                                                                       \
  T __tsan_atomic##bits##_load(const volatile T* at, int) {                                             \
    atomic_access<false, true>(const_cast<const T*>(at), bits / 8, TILEWISE_HERE);                      \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                     \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int) {                                      \
    atomic_access<true, false>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                            \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                     \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int) {                                      \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                     \
  TILEWISE_FETCH(bits, T, add)                                                                          \
  TILEWISE_FETCH(bits, T, sub)                                                                          \
  TILEWISE_FETCH(bits, T, and)                                                                          \
  TILEWISE_FETCH(bits, T, or)                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int, int) {   \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                     \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int, int) {     \
    atomic_access<true, true>(const_cast<T*>(at), bits / 8, TILEWISE_HERE);                             \
    return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, long bytes) {
  accessed(at, static_cast<std::size_t>(bytes), {}, TILEWISE_HERE);
}
void __tsan_write_range(void* at, long bytes) {
  accessed(at, static_cast<std::size_t>(bytes), {.writes = true}, TILEWISE_HERE);
}
void __tsan_atomic_thread_fence(int) {}
TILEWISE_ACCESSES(1)
TILEWISE_ACCESSES(2)
TILEWISE_ACCESSES(4)
TILEWISE_ACCESSES(8)
TILEWISE_ACCESSES(16)
TILEWISE_ATOMICS(8, std::uint8_t)
TILEWISE_ATOMICS(16, std::uint16_t)
TILEWISE_ATOMICS(32, std::uint32_t)
TILEWISE_ATOMICS(64, std::uint64_t)

}  // extern "C"
