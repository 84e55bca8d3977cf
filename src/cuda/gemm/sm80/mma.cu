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

// Tiles of 128 x 128 results, eight warps of 64 x 32 each, by mma.sync. Tiles of the factors, 32 summands at
// a time, come by copies that are three stages ahead. A warp's 32 columns are two groups of 16: neighbours,
// or, where gated, of the gate and of what it gates, 64 further on.

constexpr int tile = 128;
constexpr int depth = 32;
constexpr int threads = 256;
constexpr int stages = 4;
constexpr int factor_bytes = tile * depth * 2;
constexpr std::size_t shared_bytes = std::size_t{stages} * 2 * factor_bytes;
static_assert(shared_bytes >= std::size_t{tile} * tile * 4);  // sums on their way out
/// Tensor cores truncate their sums; where the result is in f32, they are taken out this often.
constexpr int piece = 4;

/// 128 rows of a factor: in shared memory as they are in memory, [rows, summands] or [summands, rows].
template <bool by_rows>
struct FactorTile {
  using Pointer = MatrixPointer<by_rows ? depth : tile>;

  /// Rows first to first + count of the factor to rows at `to_row` of the tile.
  template <int count>
  static __device__ void load(std::byte* tile_smem, const Matrix& factor, std::int64_t first, int to_row,
                              std::int64_t summand, bool aligned) {
    const auto left = [](std::int64_t from, std::int64_t end, int most) {
      return static_cast<int>(min(max(end - from, std::int64_t{0}), std::int64_t{most}));
    };
    const int rows = left(first, factor.rows, count), summands = left(summand, factor.columns, depth);
    using Tile = SwizzledTile<by_rows ? depth : tile>;
    // In chunks of eight along what is contiguous.
    constexpr int across = (by_rows ? depth : count) / 8;
    constexpr int lines = by_rows ? count : depth;
    const int first_chunk = by_rows ? 0 : to_row / 8;
#pragma unroll 2
    for (int index = static_cast<int>(threadIdx.x); index < lines * across; index += threads) {
      const int line = index / across, chunk = index % across;
      std::byte* to = tile_smem + Tile::offset(line + (by_rows ? to_row : 0), chunk + first_chunk);
      const int elements =
          by_rows ? (line < rows ? summands - 8 * chunk : 0) : (line < summands ? rows - 8 * chunk : 0);
      const std::byte* from = by_rows ? factor.at(first + line, summand + 8 * chunk)
                                      : factor.at(first + 8 * chunk, summand + line);
      if (aligned) {
        copy_async_part(to, elements > 0 ? from : factor.data, max(0, min(16, 2 * elements)));
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

  /// Where a lane points for fragments of a, and of b.
  static __device__ Pointer a_pointer(std::uint32_t tile_smem) {
    if constexpr (by_rows) return Pointer::by_rows(tile_smem);
    // Matrices turned: summands 0 to 7 of rows 0 to 7 and 8 to 15, then summands 8 to 15.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {tile_smem + SwizzledTile<tile>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2)};
  }
  static __device__ Pointer b_pointer(std::uint32_t tile_smem) {
    if constexpr (by_rows) return Pointer::by_columns(tile_smem);
    return Pointer::by_rows(tile_smem);
  }
  /// 16 rows from `row` on and 16 summands: a's fragment, or two of b's.
  static __device__ void get(std::uint32_t (&to)[4], const Pointer& at, int row, int step) {
    if constexpr (by_rows) {
      load_matrices(to, at.at(row, step));
    } else {
      load_matrices_turned(to, at.at(16 * step, row / 16));
    }
  }
};

using Sums = float[4][4][4];  // 16 x 8 fragments of a warp's tile

template <typename T, bool a_by_rows, bool b_by_rows>
__global__ void __launch_bounds__(threads, 2)
    mma_kernel(const __grid_constant__ GemmCall call, const __grid_constant__ TileOrder order, bool aligned) {
  TILEWISE_DYNAMIC_SHARED(std::byte, tiles_smem, 128);
  using TileA = FactorTile<a_by_rows>;
  using TileB = FactorTile<b_by_rows>;
  const GemmProblem& problem = call.problem;
  const int columns = problem.gated ? tile / 2 : tile;
  const TilePlace place = order.place(static_cast<int>(blockIdx.x));
  const std::int64_t first_m = static_cast<std::int64_t>(place.m) * tile;
  const std::int64_t first_n = static_cast<std::int64_t>(place.n) * columns;
  const auto blocks = static_cast<int>((problem.k + depth - 1) / depth);
  const auto load = [&](int block) {
    if (block < blocks) {
      std::byte* to = tiles_smem + block % stages * 2 * factor_bytes;
      const std::int64_t summand = static_cast<std::int64_t>(block) * depth;
      TileA::template load<tile>(to, call.a, first_m, 0, summand, aligned);
      if (problem.gated) {
        TileB::template load<tile / 2>(to + factor_bytes, call.gate, first_n, 0, summand, aligned);
        TileB::template load<tile / 2>(to + factor_bytes, call.b, first_n, tile / 2, summand, aligned);
      } else {
        TileB::template load<tile>(to + factor_bytes, call.b, first_n, 0, summand, aligned);
      }
    }
    commit_copies();  // a group each time, so that they can be counted
  };

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp / 4 * 64;
  const int group[2] = {problem.gated ? warp % 4 * 16 : warp % 4 * 32,
                        problem.gated ? tile / 2 + warp % 4 * 16 : warp % 4 * 32 + 16};
  Sums sums = {}, totals = {};
  const bool wide = call.out.dtype == DType::f32;
  for (int block = 0; block < stages - 1; ++block) load(block);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    wait_copies<stages - 2>();
    __syncthreads();  // this block's tiles are there, and nobody reads those before any more
    load(block + stages - 1);
    const auto now =
        static_cast<std::uint32_t>(__cvta_generic_to_shared(tiles_smem + block % stages * 2 * factor_bytes));
    const auto a = TileA::a_pointer(now);
    const auto b = TileB::b_pointer(now + factor_bytes);
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      std::uint32_t left[4][4], right[2][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) TileA::get(left[r], a, row + 16 * r, step);
#pragma unroll
      for (int n = 0; n < 2; ++n) TileB::get(right[n], b, group[n], step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          multiply_matrices<T>(sums[r][n], left[r], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
    if (wide && block % piece == piece - 1) {
#pragma unroll
      for (int n = 0; n < 64; ++n) {
        float& sum = sums[n / 16][n / 4 % 4][n % 4];
        totals[n / 16][n / 4 % 4][n % 4] += sum;
        sum = 0;
      }
    }
  }
  // By way of shared memory, where the stages are done with, so that neighbours are written together.
  auto* sums_smem = reinterpret_cast<float*>(tiles_smem);
  wait_copies<0>();
  __syncthreads();  // nobody reads tiles any more
#pragma unroll
  for (int n = 0; n < 64; n += 2) {
    const int r = row + n / 16 * 16 + lane / 4 + n % 4 / 2 * 8;
    const int column = group[n / 8 % 2] + n / 4 % 2 * 8 + lane % 4 * 2;
    const float(&x)[4] = sums[n / 16][n / 4 % 4];
    const float(&more)[4] = totals[n / 16][n / 4 % 4];
    *reinterpret_cast<float2*>(sums_smem + r * tile + column) = {x[n % 4] + more[n % 4],
                                                                 x[n % 4 + 1] + more[n % 4 + 1]};
  }
  __syncthreads();  // all sums are there
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < tile * columns; index += threads) {
    const int r = index / columns, column = index % columns;
    const float* from = sums_smem + r * tile + column;
    const float x = problem.gated ? from[tile / 2] : from[0];
    wide ? finish_element<T, false>(call, first_m + r, first_n + column, x, from[0])
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
