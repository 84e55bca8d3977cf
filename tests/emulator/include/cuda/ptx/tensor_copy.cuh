#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "emulator.h"
#include "races/races.h"

namespace tilewise::cuda {

inline void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int d, int s, int h,
                     int b) {
  const std::int32_t place[4] = {d, s, h, b};
  emulator::load_box(to_smem, &map, barrier_smem, place, 4);
}
inline void copy_box_of_groups(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int d, int s,
                               int h, int b) {
  const std::int32_t place[5] = {d, 0, s, h, b};
  emulator::load_box(to_smem, &map, barrier_smem, place, 5);
}
inline void copy_box(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int column, int row) {
  const std::int32_t place[2] = {column, row};
  emulator::load_box(to_smem, &map, barrier_smem, place, 2);
}
inline void copy_panels(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int panel, int row) {
  const std::int32_t place[3] = {0, row, panel};
  emulator::load_box(to_smem, &map, barrier_smem, place, 3);
}
inline void copy_bytes(void* to_smem, const void* from_gmem, int bytes, Mbarrier* barrier_smem) {
  emulator::load_bytes(to_smem, from_gmem, static_cast<std::uint32_t>(bytes), barrier_smem);
}
inline void store_box(const CUtensorMap& map, const void* from_smem, int d, int s, int h, int b) {
  const std::int32_t place[4] = {d, s, h, b};
  emulator::store_box(&map, from_smem, place, 4);
}
inline void store_box(const CUtensorMap& map, const void* from_smem, int column, int row) {
  const std::int32_t place[2] = {column, row};
  emulator::store_box(&map, from_smem, place, 2);
}
inline void commit_stores() { emulator::commit_stores(); }
template <int groups = 0>
inline void wait_stores_read() {
  emulator::wait_stores_read(groups);
}
inline void wait_stores() { emulator::wait_stores(0); }
inline void add_floats(float* to_gmem, const float* from_smem, int bytes) {
  emulator::add_floats(to_gmem, from_smem, bytes);
}
inline void prefetch_box(const CUtensorMap&, int, int, int, int) {}
inline void prefetch_map(const CUtensorMap&) {}
inline void fence_async_proxy() { emulator::races::fence_async_proxy(); }

}  // namespace tilewise::cuda
