#include "cuda/gemm/sm80/mma.h"

#include "cuda/gemm/common/finish.cuh"
#include "cuda/gemm/common/order.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::gemm {
namespace {

// A CTA computes a tile of 128 x 128 results by mma.sync, each of its eight warps 64 x 32 of them. Tiles of A
// and B, 32 of K at a time, are copied asynchronously, three stages ahead. A warp's 32 columns are two groups
// of 16: neighbours or, with a gate, 16 columns of the gate and the 16 that they gate, 64 further on.

constexpr int tile = 128;
constexpr int depth = 32;
constexpr int threads = 256;
constexpr int stages = 4;
constexpr int operand_bytes = tile * depth * 2;
constexpr std::size_t shared_bytes = std::size_t{stages} * 2 * operand_bytes;
// Results go through the stages on their way out.
static_assert(shared_bytes >= std::size_t{tile} * tile * 4);
/// Tensor cores truncate as they accumulate. If the result is in f32, accumulators are added to totals in f32
/// registers every so many stages.
constexpr int promotion_interval = 4;

/// A tile of 128 rows of an operand by 32 of K. Its layout in shared memory is the operand's in memory:
/// K-major (by_rows), or [K, rows].
template <bool by_rows>
struct OperandTile {
  using Pointer = MatrixPointer<by_rows ? depth : tile>;

  /// Starts to copy rows first to first + count of the operand to the rows of the tile from `to_row` on.
  /// Copies that are not aligned are synchronous.
  template <int count>
  static __device__ void load(std::byte* tile_smem, const Matrix& operand, std::int64_t first, int to_row,
                              std::int64_t k, bool aligned) {
    const auto remaining = [](std::int64_t from, std::int64_t end, int most) {
      return static_cast<int>(min(max(end - from, std::int64_t{0}), std::int64_t{most}));
    };
    const int rows = remaining(first, operand.rows, count),
              depth_remaining = remaining(k, operand.columns, depth);
    using Tile = SwizzledTile<by_rows ? depth : tile>;
    // Chunks of eight elements along the contiguous dimension.
    constexpr int across = (by_rows ? depth : count) / 8;
    constexpr int lines = by_rows ? count : depth;
    const int first_chunk = by_rows ? 0 : to_row / 8;
#pragma unroll 2
    for (int index = static_cast<int>(threadIdx.x); index < lines * across; index += threads) {
      const int line = index / across, chunk = index % across;
      std::byte* to = tile_smem + Tile::offset(line + (by_rows ? to_row : 0), chunk + first_chunk);
      const int elements = by_rows ? (line < rows ? depth_remaining - 8 * chunk : 0)
                                   : (line < depth_remaining ? rows - 8 * chunk : 0);
      const std::byte* from =
          by_rows ? operand.at(first + line, k + 8 * chunk) : operand.at(first + 8 * chunk, k + line);
      if (aligned) {
        copy_async_part(to, elements > 0 ? from : operand.data, max(0, min(16, 2 * elements)));
      } else {
        std::uint32_t words[4] = {};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const std::uint32_t word = n < elements ? reinterpret_cast<const std::uint16_t*>(from)[n] : 0;
          words[n / 2] |= word << (n % 2 * 16);
        }
        *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      }
    }
  }

  /// The address that a lane passes to ldmatrix for fragments of A, and of B.
  static __device__ Pointer a_pointer(std::uint32_t tile_smem) {
    if constexpr (by_rows) return Pointer::by_rows(tile_smem);
    // Transposed 8 x 8 matrices: K 0 to 7 of rows 0 to 7, of rows 8 to 15, then K 8 to 15 of both.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {tile_smem + SwizzledTile<tile>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2)};
  }
  static __device__ Pointer b_pointer(std::uint32_t tile_smem) {
    if constexpr (by_rows) return Pointer::by_columns(tile_smem);
    return Pointer::by_rows(tile_smem);
  }
  /// Loads 16 rows from `row` on by 16 of K: a fragment of A, or two of B.
  static __device__ void get(std::uint32_t (&to)[4], const Pointer& at, int row, int step) {
    if constexpr (by_rows) {
      load_matrices(to, at.at(row, step));
    } else {
      load_matrices_transposed(to, at.at(16 * step, row / 16));
    }
  }
};

using Accumulators = float[4][4][4];  // 4 x 4 fragments of 16 x 8 elements, a warp's 64 x 32

template <typename T, bool a_by_rows, bool b_by_rows>
__global__ void __launch_bounds__(threads, 2)
    mma_kernel(const __grid_constant__ GemmCall call, const __grid_constant__ TileOrder order, bool aligned) {
  TILEWISE_DYNAMIC_SHARED(std::byte, tiles_smem, 128);
  using TileA = OperandTile<a_by_rows>;
  using TileB = OperandTile<b_by_rows>;
  const GemmProblem& problem = call.problem;
  const int columns = problem.gated ? tile / 2 : tile;
  const TilePlace place = order.place(static_cast<int>(blockIdx.x));
  const std::int64_t first_m = static_cast<std::int64_t>(place.m) * tile;
  const std::int64_t first_n = static_cast<std::int64_t>(place.n) * columns;
  const auto blocks = static_cast<int>((problem.k + depth - 1) / depth);
  const auto load = [&](int block) {
    if (block < blocks) {
      std::byte* to = tiles_smem + block % stages * 2 * operand_bytes;
      const std::int64_t k = static_cast<std::int64_t>(block) * depth;
      TileA::template load<tile>(to, call.a, first_m, 0, k, aligned);
      if (problem.gated) {
        TileB::template load<tile / 2>(to + operand_bytes, call.gate, first_n, 0, k, aligned);
        TileB::template load<tile / 2>(to + operand_bytes, call.b, first_n, tile / 2, k, aligned);
      } else {
        TileB::template load<tile>(to + operand_bytes, call.b, first_n, 0, k, aligned);
      }
    }
    commit_copies();  // also without copies, because wait_copies counts groups
  };

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp / 4 * 64;
  const int group[2] = {problem.gated ? warp % 4 * 16 : warp % 4 * 32,
                        problem.gated ? tile / 2 + warp % 4 * 16 : warp % 4 * 32 + 16};
  Accumulators accumulators = {}, totals = {};
  const bool out_f32 = call.out.dtype == DType::f32;
  for (int block = 0; block < stages - 1; ++block) load(block);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    wait_copies<stages - 2>();
    __syncthreads();  // all threads' copies have arrived, and no warp reads the stage before, loaded next
    load(block + stages - 1);
    const auto now =
        static_cast<std::uint32_t>(__cvta_generic_to_shared(tiles_smem + block % stages * 2 * operand_bytes));
    const auto a = TileA::a_pointer(now);
    const auto b = TileB::b_pointer(now + operand_bytes);
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      std::uint32_t a_rmem[4][4], b_rmem[2][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) TileA::get(a_rmem[r], a, row + 16 * r, step);
#pragma unroll
      for (int n = 0; n < 2; ++n) TileB::get(b_rmem[n], b, group[n], step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          multiply_matrices<T>(accumulators[r][n], a_rmem[r], b_rmem[n / 2][n % 2 * 2],
                               b_rmem[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
    if (out_f32 && block % promotion_interval == promotion_interval - 1) {
#pragma unroll
      for (int n = 0; n < 64; ++n) {
        float& sum = accumulators[n / 16][n / 4 % 4][n % 4];
        totals[n / 16][n / 4 % 4][n % 4] += sum;
        sum = 0;
      }
    }
  }
  // Results go through shared memory, where the stages were, so that threads write neighbouring elements.
  auto* results_smem = reinterpret_cast<float*>(tiles_smem);
  wait_copies<0>();
  __syncthreads();  // no warp reads the stages any more
#pragma unroll
  for (int n = 0; n < 64; n += 2) {
    const int r = row + n / 16 * 16 + lane / 4 + n % 4 / 2 * 8;
    const int column = group[n / 8 % 2] + n / 4 % 2 * 8 + lane % 4 * 2;
    const float(&x)[4] = accumulators[n / 16][n / 4 % 4];
    const float(&more)[4] = totals[n / 16][n / 4 % 4];
    *reinterpret_cast<float2*>(results_smem + r * tile + column) = {x[n % 4] + more[n % 4],
                                                                    x[n % 4 + 1] + more[n % 4 + 1]};
  }
  __syncthreads();  // all warps have stored their results
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < tile * columns; index += threads) {
    const int r = index / columns, column = index % columns;
    const float* from = results_smem + r * tile + column;
    const float x = problem.gated ? from[tile / 2] : from[0];
    out_f32 ? finish_element<T, false>(call, first_m + r, first_n + column, x, from[0])
            : finish_element<T, true>(call, first_m + r, first_n + column, x, from[0]);
  }
}

template <typename T>
void run_of(const GemmCall& call, const Context& context) {
  const GemmProblem& problem = call.problem;
  const int columns = problem.gated ? tile / 2 : tile;
  const auto tiles_of = [](std::int64_t length, int of) { return static_cast<int>((length + of - 1) / of); };
  const int tiles_m = tiles_of(problem.m, tile), tiles_n = tiles_of(problem.n, columns);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const TileOrder order = TileOrder::of(tiles_m, tiles_n, 2 * multiprocessors, tile, tile);
  const bool aligned = call.a.aligned() && call.b.aligned() && call.gate.aligned();
  const Launch how{.name = "tilewise mma gemm",
                   .blocks = std::int64_t{tiles_m} * tiles_n,
                   .threads = threads,
                   .shared_bytes = shared_bytes,
                   .stream = static_cast<cudaStream_t>(context.stream)};
  if (problem.a_by_rows) {
    problem.b_by_rows ? launch<mma_kernel<T, true, true>>(how, call, order, aligned)
                      : launch<mma_kernel<T, true, false>>(how, call, order, aligned);
  } else {
    problem.b_by_rows ? launch<mma_kernel<T, false, true>>(how, call, order, aligned)
                      : launch<mma_kernel<T, false, false>>(how, call, order, aligned);
  }
}

}  // namespace

void run_mma(const GemmCall& call, const Context& context) {
  call.problem.dtype == DType::f16 ? run_of<__half>(call, context) : run_of<__nv_bfloat16>(call, context);
}

}  // namespace tilewise::cuda::gemm
