#include <link.h>

#include <algorithm>
#include <cstring>

#include "races/state.h"

namespace tilewise::emulator::races {

std::recursive_mutex lock;
std::map<std::uintptr_t, BlockClock*> blocks;
std::unordered_map<std::uintptr_t, Others> flags;
LaunchState* launch = nullptr;
std::string found_text;
thread_local BlockClock* current = nullptr;
thread_local std::uint32_t place = 0;

ThreadClock& own() {
  settle_write();
  return current->threads[self->index.x];
}

bool knows(const Clock& clock, const Access& access, bool async) {
  if (access.time == under_way) return false;
  const Times& times = async && access.slot < current->thread_count ? clock.fenced : clock.seen;
  return times[access.slot] >= access.time;
}

namespace {

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

}  // namespace

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

namespace {

void read_cell(Cell& cell, const Clock& clock, const Access& access, std::uintptr_t at, bool async) {
  const Access& write = cell.write;
  if (write.time != 0 && !(write.atomic && access.atomic) && (write.halves & access.halves) != 0 &&
      !knows_a_write(clock, cell, async)) {
    conflict(clock, write, true, access, false, at, async);
  }
  // An operand that was never written belongs to a product whose result is not used.
  if (write.time == 0 && access.slot >= current->thread_count) return;
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

// The cells of the block that runs. The next block reuses their memory.
struct Cells {
  std::vector<Cell> dynamic, statics;
  std::uint32_t blocks = 0;
};
thread_local Cells cells;

}  // namespace

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

namespace {

std::map<std::uintptr_t, Allocation>& allocations() {
  static std::map<std::uintptr_t, Allocation> all;
  return all;
}
thread_local Allocation* last_allocation = nullptr;

}  // namespace

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

namespace {

bool knows_global(const Clock& clock, const GlobalAccess& access, bool& previous_kernel) {
  if (access.launch != launch->id) {
    const bool waited = clock.seen[current->slot_of_previous_kernel()] != 0;
    const auto& runs = waited ? launch->after_waiting : launch->before_waiting;
    previous_kernel = runs.contains(access.launch);
    return !previous_kernel;
  }
  if (access.time == under_way) return false;
  if (access.block == current->number) return clock.seen[access.slot] >= access.time;
  if (clock.others == nullptr) return false;
  const auto found = clock.others->find(access.block);
  return found != clock.others->end() && found->second[access.slot] >= access.time;
}

void global_conflict(const GlobalAccess& earlier, bool earlier_writes, const GlobalAccess& later,
                     bool later_writes, bool previous_kernel) {
  report(previous_kernel ? "global memory of the previous kernel, which may still run" : "global memory",
         earlier.place, later.place,
         (previous_kernel ? "a previous kernel, block " : "block ") + std::to_string(earlier.block) + ", " +
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

// The bytes of the cell at `at` that are in a range, as bits.
std::uint8_t halves_of(std::uintptr_t at, std::uintptr_t begin, std::uintptr_t end) {
  return static_cast<std::uint8_t>((at >= begin ? 1 : 0) | (at + 1 >= begin && at + 1 < end ? 2 : 0));
}

}  // namespace

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
  // Most accesses are to the thread's own stack, which is not watched.
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const auto stack = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  return at - stack > 0x40000 && stack - at > 0x40000;
}

namespace {

// A write is examined after it was done, since threads may write unordered what is there already, such as
// zeros past the end of a sequence, which several threads clear. Then a reader must only be ordered after one
// of these writes.
struct Unsettled {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::byte before[16] = {};
  Access access;
  const Clock* clock = nullptr;
};
thread_local Unsettled unsettled;

}  // namespace

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

void begin_cells(BlockClock& block) {
  ++cells.blocks;
  cells.dynamic.resize(std::max(cells.dynamic.size(), block.dynamic_bytes / granule + 1));
  // Static shared memory is the thread-local memory of the program.
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
  block.statics = found.begin / granule * granule;
  cells.statics.resize(found.bytes / granule + 1);
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

}  // namespace tilewise::emulator::races
