#include "races/state.h"

// The operations that order accesses: barriers, mbarriers, fences, flags and waits.

namespace tilewise::emulator::races {

namespace {

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

// Launches and blocks.

namespace {

std::map<void*, LaunchState>& streams() {
  static std::map<void*, LaunchState> all;
  return all;
}
std::uint32_t launches = 0;

}  // namespace

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
  begin_cells(*block);
  block->threads.resize(threads);
  for (unsigned n = 0; n < threads; ++n) {
    Clock& clock = block->threads[n].clock;
    clock.seen.assign(block->slots(), 0);
    clock.fenced.assign(block->slots(), 0);
    clock.seen[n] = 1;
  }
  const std::lock_guard guard(lock);
  if (launch != nullptr && !launch->early) {
    for (ThreadClock& thread : block->threads) thread.clock.seen[block->slot_of_previous_kernel()] = 1;
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
void waited_for_previous_kernel() {
  const std::lock_guard guard(lock);
  launch->waited = true;
  own().clock.seen[current->slot_of_previous_kernel()] = 1;
}
void let_next_kernel_start() {
  const std::lock_guard guard(lock);
  if (own().clock.seen[current->slot_of_previous_kernel()] == 0) launch->triggered_before_waiting = true;
}

// Accesses by the hardware.

namespace {

// An access by a bulk copy. It ends with the phase of the mbarrier in which its bytes arrive.
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

// Removes the ranges of groups that are done and calls body(address) for each of their cells.
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

}  // namespace tilewise::emulator::races
