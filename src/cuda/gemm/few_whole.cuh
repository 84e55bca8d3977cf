#pragma once

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/gemm/few_rows.cuh"
#include "cuda/gemm/finish.cuh"
#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::gemm {

// The same product as few.cuh's by whole rows, a candidate: weights come as they lie, by copies of one to
// three KiB of a row, those of eight rows on end, which is how memory is read best. Tokens stay in registers:
// a warp has some summands of all of them, and of every row. Products are mma.sync's, with tokens as rows and
// weights as columns; which summands stand in which places of a product is open, as long as both factors have
// the same, and a lane takes 16 bytes of a row, or of a token, for two products.

struct FewWholeConfig {
  int tokens = 16;       ///< 16 or 32: rows of a are filled up to it
  int unit_blocks = 32;  ///< of 32 summands, of a unit, which is eight rows of them
  int parts = 4;         ///< units of a group of eight rows, of those that a block has
  int splits = 1;        ///< blocks that share rows by summands
  int rows = 88;         ///< places for results of rows, of each factor, in eights
  bool gated = false;    ///< groups of eight rows of the gate and of what it gates take turns
  int stages = 8;

  static constexpr int warps = 16;
  static constexpr int multipliers = warps * 32;
  static constexpr int threads = multipliers + 32;

  constexpr int factors() const { return gated ? 2 : 1; }
  constexpr int summands() const { return 32 * unit_blocks * parts * splits; }
  /// Blocks of a unit that a warp has at the most.
  constexpr int of_warp() const { return (unit_blocks + warps - 1) / warps; }
  constexpr int piece_bytes() const { return 64 * unit_blocks; }
  /// Of two rows on end, 64 bytes each lie in different banks.
  constexpr int pitch() const { return piece_bytes() % 128 == 64 ? piece_bytes() : piece_bytes() + 64; }
  constexpr int stage_bytes() const { return 8 * pitch(); }
  /// Sums of eight rows.
  constexpr int sums() const { return 8 * tokens; }
  constexpr int exchanged_bytes() const { return 2 * warps * sums() * 4; }
  constexpr int result_pitch() const { return tokens + 1; }
  constexpr int result_bytes() const { return factors() * rows * result_pitch() * 4; }
  constexpr std::size_t shared_bytes() const {
    return static_cast<std::size_t>(stages * stage_bytes() + exchanged_bytes() +
                                    (result_bytes() + 15) / 16 * 16 + 16 * stages + 8);
  }
  /// Sums of a block's that another finishes.
  constexpr int partial_floats() const { return factors() * rows * tokens; }

  constexpr bool is_sound() const {
    return (tokens == 16 || tokens == 32) && rows % 8 == 0 && stages >= 2 && stages < 256 &&
           multipliers % sums() == 0 && shared_bytes() <= 232448;
  }
};

/// The grid is tiles of rows by splits.
struct FewWholeArguments {
  GemmCall call;
  int rows = 0;    ///< that each tile has
  int longer = 0;  ///< so many tiles have one more
  float* partials = nullptr;
  std::uint32_t* flags = nullptr;
  std::uint32_t owner = 0;
};

template <typename T, FewWholeConfig c>
struct FewWhole {
  static_assert(c.is_sound());
  static constexpr int factors = c.factors();
  static constexpr int token_tiles = c.tokens / 16;
  const FewWholeArguments& arguments;
  const FewOverlap& overlap;
  std::byte* smem;
  const int tile, split;
  const int first, rows;

  __device__ __forceinline__ FewWhole(const FewWholeArguments& arguments_, const FewOverlap& overlap_,
                                      std::byte* smem_)
      : arguments(arguments_),
        overlap(overlap_),
        smem(smem_),
        tile(static_cast<int>(blockIdx.x)),
        split(static_cast<int>(blockIdx.y)),
        first(tile * arguments_.rows + min(tile, arguments_.longer)),
        rows(arguments_.rows + (tile < arguments_.longer ? 1 : 0)) {}

  __device__ __forceinline__ std::byte* weights(int stage) const { return smem + stage * c.stage_bytes(); }
  __device__ __forceinline__ float* exchanged(int which) const {
    return reinterpret_cast<float*>(smem + c.stages * c.stage_bytes()) + which * (c.warps * c.sums());
  }
  __device__ __forceinline__ float* results() const {
    return reinterpret_cast<float*>(smem + c.stages * c.stage_bytes() + c.exchanged_bytes());
  }
  __device__ __forceinline__ float& result(int factor, int row, int token) const {
    return results()[(factor * c.rows + row) * c.result_pitch() + token];
  }
  __device__ __forceinline__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(smem + c.shared_bytes() - 16 * c.stages - 8) + stage;
  }
  __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(c.stages + stage); }
  __device__ __forceinline__ Mbarrier* over() const { return full(2 * c.stages); }

  __device__ __forceinline__ int groups() const { return (rows + 7) / 8; }
  __device__ __forceinline__ static void sync() { sync_some<1, c.multipliers>(); }

  __device__ __forceinline__ void make_barriers() const {
    for (int stage = 0; stage < c.stages; ++stage) {
      init_barrier(full(stage), 1);
      init_barrier(empty(stage), c.warps);
    }
    init_barrier(over(), c.warps);
    fence_barrier_inits();
  }

  /// By a whole warp: a lane has one of the eight rows.
  __device__ __forceinline__ void load(int lane) const {
    const int units = groups() * factors * c.parts;
    Ring<c.stages> ring;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit, ring.advance()) {
      if (unit >= c.stages) wait(empty(ring.stage()), ring.parity() ^ 1);
      const int group = unit / (factors * c.parts), rest = unit % (factors * c.parts);
      const int count = min(8, rows - 8 * group);
      const Matrix& from = c.gated && rest / c.parts == 0 ? arguments.call.gate : arguments.call.b;
      if (lane == 0) arrive_expecting(full(ring.stage()), count * c.piece_bytes());
      __syncwarp();
      if (lane < count) {
        copy_bytes(weights(ring.stage()) + lane * c.pitch(),
                   from.data + std::int64_t{first + 8 * group + lane} * from.stride_row * 2 +
                       (split * c.parts + rest % c.parts) * c.piece_bytes(),
                   c.piece_bytes(), full(ring.stage()));
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ int block_of(int of_split) const {
    return of_split * static_cast<int>(gridDim.x) + tile;
  }
  __device__ __forceinline__ float* partial(int of_split) const {
    return arguments.partials + std::int64_t{block_of(of_split)} * c.partial_floats();
  }

  /// Of several blocks' sums, those of all to the last of them. True in that one.
  __device__ __forceinline__ bool join(int thread) const {
    if constexpr (c.splits == 1) return true;
    const auto place = [&](int at) -> float& {
      return results()[at / c.tokens * c.result_pitch() + at % c.tokens];
    };
    if (split + 1 < c.splits) {
      float* to = partial(split);
#pragma unroll 4
      for (int at = thread; at < c.partial_floats(); at += c.multipliers) to[at] = place(at);
      sync();  // all are written
      if (thread == 0) raise_flag(arguments.flags + block_of(split), arguments.owner);
      return false;
    }
    if (thread < c.splits - 1) {
      await_flag(arguments.flags + block_of(thread), arguments.owner);
      arguments.flags[block_of(thread)] = 0;
    }
    __syncwarp();
    sync();  // they are there
#pragma unroll 4
    for (int at = thread; at < c.partial_floats(); at += c.multipliers) {
      float sum = place(at);
#pragma unroll
      for (int other = 0; other < c.splits - 1; ++other) sum += __ldcg(partial(other) + at);
      place(at) = sum;
    }
    sync();  // sums are whole
    return true;
  }

  /// Whether a warp has so many blocks of a unit.
  __device__ __forceinline__ static bool has(int warp, int n) {
    return (n + 1) * c.warps <= c.unit_blocks || warp + n * c.warps < c.unit_blocks;
  }
  /// 16 bytes of a token, of which other multiprocessors may have written; zeros where not `valid`. All loads
  /// are under way at once.
  __device__ __forceinline__ static uint4 load_tokens(const std::byte* from_gmem, bool valid) {
    uint4 to;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\n"
        "mov.u32 %1, 0;\n"
        "mov.u32 %2, 0;\n"
        "mov.u32 %3, 0;\n"
        "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
        : "l"(from_gmem), "r"(static_cast<std::uint32_t>(valid))
        : "memory");
    return to;
  }

  __device__ __forceinline__ void multiply(int thread) const {
    const int warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const GemmCall& call = arguments.call;
    uint4 x[c.parts][c.of_warp()][token_tiles][2];
#pragma unroll
    for (int part = 0; part < c.parts; ++part) {
#pragma unroll
      for (int n = 0; n < c.of_warp(); ++n) {
        const int block = warp + n * c.warps;
        const int summand = ((split * c.parts + part) * c.unit_blocks + block) * 32 + 8 * t;
#pragma unroll
        for (int half = 0; half < 2 * token_tiles; ++half) {
          const int token = g + 8 * half;
          const bool valid = has(warp, n) && token < call.problem.m;
          const std::byte* from = call.a.data + (valid ? token * call.a.stride_row + summand : 0) * 2;
          x[part][n][half / 2][half % 2] = load_tokens(from, valid);
        }
      }
    }

    Ring<c.stages> ring;
#pragma unroll 1
    for (int turn = 0; turn < groups() * factors; ++turn) {
      float sums[token_tiles][4] = {};
#pragma unroll
      for (int part = 0; part < c.parts; ++part) {
        wait(full(ring.stage()), ring.parity());
        const std::byte* from = weights(ring.stage()) + g * c.pitch() + warp * 64 + t * 16;
#pragma unroll
        for (int n = 0; n < c.of_warp(); ++n) {
          if (!has(warp, n)) break;
          const uint4 w = *reinterpret_cast<const uint4*>(from + n * c.warps * 64);
#pragma unroll
          for (int m = 0; m < token_tiles; ++m) {
            const uint4& low = x[part][n][m][0];
            const uint4& high = x[part][n][m][1];
            multiply_matrices<T>(sums[m], {low.x, high.x, low.y, high.y}, w.x, w.y);
            multiply_matrices<T>(sums[m], {low.z, high.z, low.w, high.w}, w.z, w.w);
          }
        }
        __syncwarp();  // all lanes have read
        if (lane == 0) arrive(empty(ring.stage()));
        ring.advance();
      }
      float* to = exchanged(turn % 2) + warp * c.sums() + lane;
#pragma unroll
      for (int n = 0; n < 4 * token_tiles; ++n) to[n * 32] = sums[n / 4][n % 4];
      sync();  // all warps' are there; those of the turn before the last were read
      if (thread / c.sums() == turn % (c.multipliers / c.sums())) {
        const int of = thread % c.sums();
        float sum = 0;
#pragma unroll
        for (int n = 0; n < c.warps; ++n) sum += exchanged(turn % 2)[n * c.sums() + of];
        const int e = of / 32, of_lane = of % 32;
        result(turn % factors, turn / factors * 8 + of_lane % 4 * 2 + e % 2, of_lane / 4 + e / 2 * 8) = sum;
      }
    }
    sync();  // results are there

    wait_for_kernel_ahead();  // before anything is written
    if (join(thread)) {
      for (int at = thread; at < rows * c.tokens; at += c.multipliers) {
        const int token = at / rows, row = at % rows;
        finish_element<T, true>(call, token, first + row, result(factors - 1, row, token),
                                result(0, row, token));
      }
      if (overlap.gives.flags != nullptr) {
        sync();  // all is written
        if (thread < 2) overlap.gives.hand_over(tile, thread);
      }
    }
    if (lane == 0) arrive(over());
  }
};

template <typename T, typename Table, int row>
__global__ void __launch_bounds__(FewWholeConfig::threads, 1)
    few_whole_kernel(const __grid_constant__ FewWholeArguments arguments,
                     const __grid_constant__ FewOverlap overlap) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr FewWholeConfig c = Table::rows[row];
  extern __shared__ __align__(1024) std::byte first_smem[];
  const FewWhole<T, c> whole(arguments, overlap, first_smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp == c.warps && lane == 0) {
    whole.make_barriers();
    if (static_cast<int>(blockIdx.y) + 1 == c.splits) overlap.gives.take_down(static_cast<int>(blockIdx.x));
  }
  __syncthreads();  // barriers are there
  if (!overlap.late) let_kernel_behind_begin();
  if (warp == c.warps) {
    whole.load(lane);
    if (lane != 0) return;
    if (overlap.late) let_kernel_behind_begin();
    overlap.go_over([&] { return is_over(whole.over(), 0); });
  } else {
    if (overlap.takes.flags != nullptr) {
      if (warp == 0) overlap.takes.await(lane);
      whole.sync();
    } else {
      wait_for_kernel_ahead();
    }
    whole.multiply(static_cast<int>(threadIdx.x));
  }
#endif
}

template <FewWholeConfig c>
FewTiles whole_tiles(const GemmProblem& problem, int multiprocessors) {
  const int tiles = std::max(multiprocessors / c.splits, 1);
  FewTiles found = FewTiles::of(static_cast<int>(problem.n / tiles), tiles, c.splits,
                                static_cast<int>(problem.k / 64), 64);
  found.turn = 0;
  return found;
}

/// Summands must be just as many as the row of the table has, and rows no more than places.
template <typename T, typename Table, int row>
void run_few_whole(const GemmCall& call, const FewSpace& space, int multiprocessors, FewTurn turn,
                   const FewOverlap& overlap, cudaStream_t stream) {
  constexpr FewWholeConfig c = Table::rows[row];
  const FewTiles tiles = whole_tiles<c>(call.problem, multiprocessors);
  const auto longer = static_cast<int>(call.problem.n % tiles.tiles);
  if (call.problem.k != c.summands() || tiles.rows + (longer > 0 ? 1 : 0) > c.rows) {
    throw DeviceError("few_whole: a product of another size");
  }
  const FewWholeArguments arguments{.call = call,
                                    .rows = tiles.rows,
                                    .longer = longer,
                                    .partials = space.partials,
                                    .flags = space.flags,
                                    .owner = new_owner()};
  launch<few_whole_kernel<T, Table, row>>({.name = "tilewise gemm of few rows by whole rows",
                                           .blocks = tiles.tiles,
                                           .threads = c.threads,
                                           .layers = c.splits,
                                           .shared_bytes = few_bytes(c.shared_bytes(), turn, overlap),
                                           .stream = stream,
                                           .early = turn == FewTurn::second},
                                          arguments, overlap);
}

}  // namespace tilewise::cuda::gemm
