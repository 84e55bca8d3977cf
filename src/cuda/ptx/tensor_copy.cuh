#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/ptx/mbarrier.cuh"

namespace tilewise::cuda {

// Copies of whole boxes of a tensor into shared memory (TMA, sm_90 on), which one thread starts and nobody
// has to wait for but on the barrier they arrive at. What a box has beyond the tensor's bounds is zeros, and
// counts as bytes that came.

/// The box of a map [B, H, S, D] whose first element is (b, h, s, d).
__device__ __forceinline__ void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int d,
                                         int s, int h, int b) {
  const std::int32_t place[4] = {d, s, h, b};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The same of a map [B, H, S, N, D], from (b, h, s, 0, d) on.
__device__ __forceinline__ void copy_box_of_groups(void* to_smem, const CUtensorMap& map,
                                                   Mbarrier* barrier_smem, int d, int s, int h, int b) {
  const std::int32_t place[5] = {d, 0, s, h, b};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The box of a map of a matrix whose first element is (row, column).
__device__ __forceinline__ void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem,
                                         int column, int row) {
  const std::int32_t place[2] = {column, row};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// The same of a map of panels, from that panel and row on.
__device__ __forceinline__ void copy_panels(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem,
                                            int panel, int row) {
  const std::int32_t place[3] = {0, row, panel};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, &map,
                                    place, barrier_smem);
}

/// A run of bytes, a multiple of 16, as its addresses are.
__device__ __forceinline__ void copy_bytes(void* to_smem, const void* from_gmem, int bytes,
                                           Mbarrier* barrier_smem) {
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to_smem, from_gmem,
                             static_cast<std::uint32_t>(bytes), barrier_smem);
}

/// From shared memory to such a box, of which what is beyond the bounds is left out, in pieces of 16 bytes.
/// The thread commits its stores, and waits for them to have been read before the memory is written anew.
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
/// Until at most `groups` that were committed are to be read yet.
template <int groups = 0>
__device__ __forceinline__ void wait_stores_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<groups>{});
}

/// Until all that was committed is where it was stored to.
__device__ __forceinline__ void wait_stores() {
  ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{});
}

/// Adds floats from shared memory to those in global memory, in no particular order with other threads; to be
/// committed like a store. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void add_floats(float* to_gmem, const float* from_smem, int bytes) {
  const auto from = static_cast<std::uint32_t>(__cvta_generic_to_shared(from_smem));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to_gmem),
               "r"(from), "r"(bytes)
               : "memory");
}

/// Has such a box come to the L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int d, int s, int h, int b) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(d),
               "r"(s), "r"(h), "r"(b)
               : "memory");
}

/// Has a map, which is a kernel's parameter, at hand for the first copy.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Between this thread's own reads and writes of shared memory and those that copies or wgmma will do there.
__device__ __forceinline__ void fence_async_proxy() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

}  // namespace tilewise::cuda
