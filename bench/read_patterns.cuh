#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/tile/ring.cuh"

namespace tilewise::cuda::sweep {

// Kernels that read a matrix and do nothing else: what an order of reading costs.

/// A block has `rows` rows and all of their bytes, in units of `unit_rows` rows and `unit_panels` times 128
/// bytes: first all rows of some bytes, then the next bytes.
struct ReadPattern {
  const char* name;
  int rows;
  int unit_rows;
  int unit_panels;
  int stages;
  bool bulk = false;    ///< rows by copies of their own, not boxes of 128 bytes
  bool slab = false;    ///< a unit by one box of all its panels
  bool turned = false;  ///< blocks begin at different bytes

  constexpr int unit_bytes() const { return unit_rows * unit_panels * 128; }
  /// Boxes begin at multiples of 1024.
  constexpr int panel_place() const { return (unit_rows * 128 + 1023) / 1024 * 1024; }
  constexpr int shared_bytes() const { return stages * unit_panels * panel_place(); }
};

struct ReadArguments {
  CUtensorMap map;
  const std::byte* data;
  std::int64_t stride;  ///< bytes
  int panels;           ///< of a row
  int n;
  ReadPattern pattern;
};

constexpr int most_read_stages = 32;

__global__ void __launch_bounds__(32, 1) read_kernel(const __grid_constant__ ReadArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte read_smem[];
  __shared__ Mbarrier full[most_read_stages];
  const ReadPattern& pattern = arguments.pattern;
  const int row = static_cast<int>(blockIdx.x) * pattern.rows;
  const int groups = (pattern.rows + pattern.unit_rows - 1) / pattern.unit_rows;
  const int slabs = arguments.panels / pattern.unit_panels;
  const int units = groups * slabs;
  const int first = pattern.turned ? static_cast<int>(blockIdx.x) * slabs / static_cast<int>(gridDim.x) : 0;
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < pattern.stages; ++stage) init_barrier(full + stage, 1);
  fence_barrier_inits();
  const auto load = [&](int unit, int stage) {
    const int slab = (first + unit / groups) % slabs;
    const int of = row + unit % groups * pattern.unit_rows;
    std::byte* to = read_smem + stage * pattern.unit_panels * pattern.panel_place();
    arrive_expecting(full + stage, pattern.unit_bytes());
    if (pattern.bulk) {
      for (int n = 0; n < pattern.unit_rows; ++n) {
        const int from = min(of + n, arguments.n - 1);
        copy_bytes(to + n * pattern.unit_panels * 128,
                   arguments.data + from * arguments.stride + slab * pattern.unit_panels * 128,
                   pattern.unit_panels * 128, full + stage);
      }
    } else if (pattern.slab) {
      copy_slab(to, arguments.map, full + stage, slab * pattern.unit_panels, of);
    } else {
      for (int panel = 0; panel < pattern.unit_panels; ++panel) {
        copy_box(to + panel * pattern.panel_place(), arguments.map, full + stage,
                 (slab * pattern.unit_panels + panel) * 64, of);
      }
    }
  };
  for (int unit = 0; unit < min(units, pattern.stages); ++unit) load(unit, unit);
  int stage = 0;
  std::uint32_t parity = 0;
  for (int unit = 0; unit < units; ++unit) {
    wait(full + stage, parity);
    if (unit + pattern.stages < units) load(unit + pattern.stages, stage);
    if (++stage == pattern.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
#endif
}

__global__ void empty_kernel() {}

}  // namespace tilewise::cuda::sweep
