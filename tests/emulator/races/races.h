#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

// The race detector finds unordered accesses to memory: between threads of a block, between blocks, between a
// kernel and the previous one that has not ended (PDL), and between threads and asynchronous operations of
// the hardware. The latter are bulk copies and wgmma, which access memory through the async proxy and need
// its fence, too.
//
// Every thread has a vector clock. It says for each other thread, and for each asynchronous operation, up to
// which time its accesses are known to be complete. Synchronisation (barriers, mbarriers, flags, fences,
// waits) passes clocks on. Two accesses to the same bytes, at least one of which is a write, are a race if
// the clock of the later access does not contain the time of the earlier one.
//
// Kernels are compiled with -fsanitize=thread, which calls a function for every access; calls.cpp has these
// functions. Only builds with TILEWISE_EMULATOR_RACES have a race detector; in others all of this is empty.

namespace tilewise::emulator {

namespace races {

/// A synchronisation object. It passes on the clocks of all threads that arrived before it was last
/// completed.
struct Sync;

#ifdef TILEWISE_EMULATOR_RACES

constexpr bool enabled = true;

void begin_launch(const char* name, void* stream, bool early);
/// Returns the first race of the launch, or null.
const char* end_launch();
/// Called for work in the stream that is not a kernel. It ends before the next kernel starts.
void stream_waits(void* stream);
void begin_block(unsigned number, unsigned threads, std::byte* dynamic, std::size_t dynamic_bytes);
void end_block();
void end_thread();

/// Allocation and release of device memory.
void allocated(const void* data, std::size_t bytes);
void freed(const void* data);

// Barriers: threads arrive, the last one completes the barrier, and threads that waited pass.
using SyncOwner = std::shared_ptr<Sync>;
void arrive(SyncOwner& sync);
void complete(SyncOwner& sync);
void pass(SyncOwner& sync);

// mbarriers, by their address.
void init(const void* mbarrier);
void arrive_at(const void* mbarrier);
void phase_over(const void* mbarrier);
void waited_for(const void* mbarrier);

// Fences.
void fence_async_proxy();
void fence_device();
void raise(const void* flag);
void found(const void* flag);
void waited_for_previous_kernel();
void let_next_kernel_start();

// Asynchronous accesses that a thread starts.
void read_by_copy(const void* from, std::size_t bytes, const void* mbarrier);  ///< null: cp.async
void write_by_copy(const void* to, std::size_t bytes, const void* mbarrier);
void write_by_async_copy(const void* to, std::size_t bytes, std::uint64_t group);  ///< cp.async
void async_copies_done(std::uint64_t first_under_way);
void read_by_store(const void* from, std::size_t bytes, std::uint64_t group);
void write_by_store(const void* to, std::size_t bytes, std::uint64_t group, bool adds);
void stores_read(std::uint64_t first_under_way);
void stores_done(std::uint64_t first_under_way);

// wgmma: threads start a product with ask(). When all have, each of the four warps reads with the clocks of
// its lanes.
struct Asked {
  std::shared_ptr<void> by_warp[4];
};
void ask(Asked& asked);
void read_by_product(const Asked& asked, int warp, const void* from, std::size_t bytes,
                     std::uint64_t product);
void products_done(std::uint64_t count);

/// Sets the place in the code from which the emulator was called, for messages.
void set_place(const void* return_address);

#else

constexpr bool enabled = false;

struct SyncOwner {};
struct Asked {};
inline void begin_launch(const char*, void*, bool) {}
inline const char* end_launch() { return nullptr; }
inline void stream_waits(void*) {}
inline void begin_block(unsigned, unsigned, std::byte*, std::size_t) {}
inline void end_block() {}
inline void end_thread() {}
inline void allocated(const void*, std::size_t) {}
inline void freed(const void*) {}
inline void arrive(SyncOwner&) {}
inline void complete(SyncOwner&) {}
inline void pass(SyncOwner&) {}
inline void init(const void*) {}
inline void arrive_at(const void*) {}
inline void phase_over(const void*) {}
inline void waited_for(const void*) {}
inline void fence_async_proxy() {}
inline void fence_device() {}
inline void raise(const void*) {}
inline void found(const void*) {}
inline void waited_for_previous_kernel() {}
inline void let_next_kernel_start() {}
inline void read_by_copy(const void*, std::size_t, const void*) {}
inline void write_by_copy(const void*, std::size_t, const void*) {}
inline void write_by_async_copy(const void*, std::size_t, std::uint64_t) {}
inline void async_copies_done(std::uint64_t) {}
inline void read_by_store(const void*, std::size_t, std::uint64_t) {}
inline void write_by_store(const void*, std::size_t, std::uint64_t, bool) {}
inline void stores_read(std::uint64_t) {}
inline void stores_done(std::uint64_t) {}
inline void ask(Asked&) {}
inline void read_by_product(const Asked&, int, const void*, std::size_t, std::uint64_t) {}
inline void products_done(std::uint64_t) {}
inline void set_place(const void*) {}

#endif

}  // namespace races
}  // namespace tilewise::emulator
