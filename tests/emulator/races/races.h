#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

// Finds accesses to memory that nothing puts in order: between threads of a block, between blocks, between a
// kernel and the one ahead of it that has not ended (Launch::early), and between threads and what the
// hardware does by itself: bulk copies and wgmma, which reach memory through the async proxy and need its
// fence besides.
//
// Every thread has a vector clock: for each other thread, and for each thing that the hardware does, how far
// it is known to have come. What puts accesses in order (barriers, mbarriers, flags, fences, waits) passes
// clocks on. Two accesses to the same bytes, one of them a write, are a race where the later one's clock does
// not have the earlier one's time.
//
// Kernels are compiled with -fsanitize=thread, which calls a function at every access; calls.cpp has those
// functions. Built by TILEWISE_EMULATOR_RACES alone; else all of this is empty.

namespace tilewise::emulator {

namespace races {

/// A thing that passes clocks on: those that arrived since it was completed last, and all before.
struct Sync;

#ifdef TILEWISE_EMULATOR_RACES

constexpr bool enabled = true;

void begin_launch(const char* name, void* stream, bool early);
/// What was found, or nothing.
const char* end_launch();
/// What is in the stream, other than a kernel, is over before the next kernel begins.
void stream_waits(void* stream);
void begin_block(unsigned number, unsigned threads, std::byte* dynamic, std::size_t dynamic_bytes);
void end_block();
void end_thread();

/// Memory of the device, made and gone.
void allocated(const void* data, std::size_t bytes);
void freed(const void* data);

// Barriers: a thread arrives, the last one completes it, and who waited passes.
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
void waited_for_kernel_ahead();
void let_next_kernel_start();

// What the hardware does for a thread.
void read_by_copy(const void* from, std::size_t bytes, const void* mbarrier);  ///< null: cp.async
void write_by_copy(const void* to, std::size_t bytes, const void* mbarrier);
void write_by_async_copy(const void* to, std::size_t bytes, std::uint64_t group);  ///< cp.async
void async_copies_done(std::uint64_t first_under_way);
void read_by_store(const void* from, std::size_t bytes, std::uint64_t group);
void write_by_store(const void* to, std::size_t bytes, std::uint64_t group, bool adds);
void stores_read(std::uint64_t first_under_way);
void stores_done(std::uint64_t first_under_way);

// wgmma: a thread asks; when all have, each of the four warps reads by what its own lanes knew.
struct Asked {
  std::shared_ptr<void> by_warp[4];
};
void ask(Asked& asked);
void read_by_product(const Asked& asked, int warp, const void* from, std::size_t bytes,
                     std::uint64_t product);
void products_done(std::uint64_t count);

/// Where the emulator was called from, for messages.
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
inline void waited_for_kernel_ahead() {}
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
