#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "emulator.h"

namespace tilewise::cuda {

inline int rank_in_pair() { return static_cast<int>(blockIdx.x % 2); }
inline void sync_pair() { emulator::sync_pair_of_blocks(); }
inline void arrive_in(int of, const Mbarrier* barrier_smem) {
  const unsigned block = blockIdx.x / 2 * 2 + static_cast<unsigned>(of);
  emulator::mbarrier_arrive(reinterpret_cast<Mbarrier*>(emulator::shared_pointer_in(block, barrier_smem)), 0);
}
inline void copy_box_to_both(void* to_smem, const CUtensorMap& map, Mbarrier* barrier_smem, int column,
                             int row) {
  const std::int32_t place[2] = {column, row};
  emulator::load_box_to_pair(to_smem, &map, barrier_smem, place, 2);
}

}  // namespace tilewise::cuda
