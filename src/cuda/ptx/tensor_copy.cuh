#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/ptx/mbarrier.cuh"

namespace tilewise::cuda {

// TMA copies (from sm_90 on): boxes of a tensor into shared memory. One thread starts a copy, which signals
// its completion at an mbarrier. Elements past the tensor's bounds become zeros, and count among the bytes
// that arrive.

/// Copies the box of a map [B, H, S, D] whose first element is (b, h, s, d).
__device__ __forceinline__ void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int d,
                                         int s, int h, int b) {
  const std::int32_t place[4] = {d, s, h, b};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The same for a map [B, H, S, N, D], from (b, h, s, 0, d) on.
__device__ __forceinline__ void copy_box_of_groups(void* to_smem, const CUtensorMap& map,
                                                   Mbarrier* barrier_smem, int d, int s, int h, int b) {
  const std::int32_t place[5] = {d, 0, s, h, b};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The same for a map of a matrix, from (row, column) on.
__device__ __forceinline__ void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem,
                                         int column, int row) {
  const std::int32_t place[2] = {column, row};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The same for a map of panels (map_of_panels), from that panel and row on.
__device__ __forceinline__ void copy_panels(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem,
                                            int panel, int row) {
  const std::int32_t place[3] = {0, row, panel};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// Copies a run of bytes. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void copy_bytes(void* to_smem, const void* from_gmem, int bytes,
                                           Mbarrier* barrier_smem) {
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, from_gmem,
                             static_cast<std::uint32_t>(bytes), barrier_smem);
}

/// Stores a box from shared memory. Chunks of 16 bytes past the tensor's bounds are left out. The thread
/// commits its stores, and waits with wait_stores_read() before the shared memory is overwritten.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* from_smem, int d, int s, int h,
                                          int b) {
  const std::int32_t place[4] = {d, s, h, b};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map, place,
                                    from_smem);
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* from_smem, int column,
                                          int row) {
  const std::int32_t place[2] = {column, row};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map, place,
                                    from_smem);
}
__device__ __forceinline__ void commit_stores() { ::cuda::ptx::cp_async_bulk_commit_group(); }
/// Waits until all but the last `groups` committed groups have read their shared memory.
template <int groups = 0>
__device__ __forceinline__ void wait_stores_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<groups>{});
}

/// Waits until all committed stores are complete in global memory.
__device__ __forceinline__ void wait_stores() {
  ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{});
}

/// Adds floats in shared memory to those in global memory, atomically and in no particular order. Committed
/// like a store. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void add_floats(float* to_gmem, const float* from_smem, int bytes) {
  const auto from = static_cast<std::uint32_t>(__cvta_generic_to_shared(from_smem));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to_gmem),
               "r"(from), "r"(bytes)
               : "memory");
}

/// Prefetches a box into the L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int d, int s, int h, int b) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(d),
               "r"(s), "r"(h), "r"(b)
               : "memory");
}

/// Prefetches a map, which is a kernel's parameter, for the first copy.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Orders this thread's reads and writes of shared memory before those of later TMA copies and wgmma, which
/// use the async proxy.
__device__ __forceinline__ void fence_async_proxy() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

}  // namespace tilewise::cuda
