#pragma once

#include "cuda/attention/common/f32/split.cuh"
#include "cuda/attention/common/f32/split_rows.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma_f32 {

// The kernel that splits whole tensors before the mainloop of another kernel reads them.

/// Loads eight numbers that are aligned to 16 bytes.
__device__ __forceinline__ void load_aligned(float (&to)[8], const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
/// Loads eight numbers of a row from `first` on, with 0 past `dims`.
__device__ __forceinline__ void load_eight(float (&to)[8], const float* row, int first, int dims,
                                           bool aligned) {
  if (aligned && first + 8 <= dims) return load_aligned(to, row + first);
#pragma unroll
  for (int n = 0; n < 8; ++n) to[n] = first + n < dims ? row[first + n] : 0.0f;
}

/// Whether rows of f32 can be read and written 16 bytes at a time.
__host__ __device__ __forceinline__ bool aligned_fours(const Rows& rows) {
  const std::int64_t strides = (rows.stride_b | rows.stride_h | rows.stride_s) * 4;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  return ((address | strides) & 15) == 0;
}

/// Splits eight numbers times a power of two into one chunk per part. Returns whether one of them may lose
/// digits.
template <int parts>
__device__ __forceinline__ bool split_eight(uint4 (&chunks)[parts], const float (&x)[8], float power) {
  std::uint32_t words[2][4];
  // The bits of the smallest number other than 0, which loses nothing: without the sign, doubled and less 1,
  // so that those of 0 wrap around to the largest.
  unsigned smallest = ~0u;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Pair two = split_two(x[2 * n] * power, x[2 * n + 1] * power);
    words[0][n] = two.high;
    words[1][n] = two.low;
    smallest = min(smallest, min(__float_as_uint(x[2 * n]) * 2 - 1, __float_as_uint(x[2 * n + 1]) * 2 - 1));
  }
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    chunks[part] = {words[part][0], words[part][1], words[part][2], words[part][3]};
  }
  return __uint_as_float(smallest / 2) * power < Losses::least<parts>;  // NaN where all are 0
}
/// Whether the largest number of a row, which neighbouring lanes share, loses digits. If so, the whole row is
/// inexact, however few its numbers are. With one part, where TF32 is allowed, there are no registers left
/// for this check.
template <int lanes>
__device__ __forceinline__ bool row_loses_digits(const float (&x)[8], float power) {
  float largest = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fabsf(x[n]));
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
  }
  return largest > 0 && largest * power < Losses::least<2>;
}
/// Counts the losses of eight numbers.
template <int parts>
__device__ __forceinline__ void count_losses(Losses& losses, const float (&x)[8], float power) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const Pair two = split_two(x[n] * power, x[n + 1] * power);
    const float2 high = unpack<__half>(two.high);
    const float2 low = unpack<__half>(two.low);
    losses.add<parts>(x[n] * power, high.x, low.x);
    losses.add<parts>(x[n + 1] * power, high.y, low.y);
  }
}

/// The tensors to split, and where their parts go.
struct Splitting {
  struct Tensor {
    Rows rows;
    int dims = 0;
    SplitRows to;
    int* unfit = nullptr;  ///< [B, heads]
  };
  int* any_unfit = nullptr;
  int count = 0;
  Tensor tensors[4];
};

/// Eight numbers of a row that a lane splits: of tensor `which`, from dim 8 · `chunk` on. Neighbouring lanes
/// share a row.
struct SplitChunk {
  int which;
  std::int64_t b, h;
  std::int64_t i;  ///< in its sequence
  std::int64_t s;  ///< in the tensor
  int chunk;
};
/// What the kernel does with each row besides splitting it. The default is nothing.
struct NoRowWork {
  static constexpr bool norms = false;        ///< whether the norms of rows are wanted
  static constexpr bool marks_tiles = false;  ///< whether unfit tiles are marked, and not their heads
  static constexpr int few_queries = 0;       ///< shorter query sequences are unfit
  template <int lanes>
  __device__ void row(const AttentionCall&, const SplitChunk&, const float (&)[8], bool) const {}
};

/// Only clears the marks of heads, for the next kernel, which finds the marks of tiles.
struct ClearMarks : NoRowWork {
  static constexpr bool marks_tiles = true;
  Unfit unfit;

  __device__ void clear() const {
    for (std::size_t n = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; n < unfit.count;
         n += std::size_t{gridDim.x} * blockDim.x) {
      unfit.queries[n] = 0;
    }
  }
};

/// Threads of the CTA that splits a tile of `chunks` chunks. Tiles for wgmma are the larger ones. On an H200
/// their CTAs were faster with two chunks per thread and, with one part, with all threads that an SM holds.
template <typename RowWork>
constexpr int split_threads(int chunks) {
  return std::min(RowWork::marks_tiles ? chunks / 2 : chunks, 512);
}
/// CTAs per SM, at least. It sets how many registers a thread may use.
template <typename RowWork>
constexpr int split_blocks(int chunks, int parts) {
  if (RowWork::marks_tiles && parts == 2) return 1024 / split_threads<RowWork>(chunks);  // 64 registers
  if (RowWork::marks_tiles) return chunks == 1024 ? 4 : 1;
  return chunks >= 1024 ? 2 : 1536 / split_threads<RowWork>(chunks);
}

/// The squared norm of a row, summed over its lanes. Its numbers are scaled, up to 2^15.
template <int lanes>
__device__ __forceinline__ float row_squares(const float (&x)[8], float power) {
  float squares = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) squares = fmaf(x[n] * power, x[n] * power, squares);
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) squares += __shfl_xor_sync(~0u, squares, apart);
  return squares;
}

// Reductions of a warp in one instruction need sm_80. A build for 7.5 alone does not know these functions,
// and has no kernel that calls them.

/// Raises `bits_smem` to the bits of the warp's highest number: numbers that are not negative compare as
/// their bits do.
__device__ __forceinline__ void raise_by_warp(int* bits_smem, float number) {
#if __CUDA_ARCH__ >= 800
  const int highest = __reduce_max_sync(~0u, __float_as_int(number));
  if (threadIdx.x % 32 == 0) atomicMax(bits_smem, highest);
#endif
}

/// Adds the counts of a warp's lanes.
__device__ __forceinline__ void add_by_warp(unsigned (&counts_smem)[3], const Losses& losses) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    const unsigned count = __reduce_add_sync(~0u, losses.counts[n]);
    if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(counts_smem + n, count);
  }
#endif
}

/// Splits the tensors; a CTA takes one tile of one of them. `Tile` is the layout of a part. Where heads are
/// marked as unfit, the kernel before has to clear the marks first, so this one waits for it; marks of tiles
/// need no such wait.
template <int dim, int tile_rows, int parts, typename Tile, typename RowWork>
__global__ void __launch_bounds__(split_threads<RowWork>(tile_rows* Tile::chunks),
                                  split_blocks<RowWork>(tile_rows* Tile::chunks, parts))
    split_tiles(const __grid_constant__ AttentionCall call, const __grid_constant__ Splitting splitting,
                const __grid_constant__ RowWork row_work) {
#if __CUDA_ARCH__ >= 800
  let_next_kernel_start();
  if constexpr (RowWork::marks_tiles) row_work.clear();
  constexpr int lanes = Tile::chunks;                                             // per row
  constexpr int step = split_threads<RowWork>(tile_rows * Tile::chunks) / lanes;  // rows at a time
  constexpr int rounds = tile_rows / step;
  static_assert(tile_rows % step == 0);
  const auto which = static_cast<int>(blockIdx.x % static_cast<std::uint32_t>(splitting.count));
  const Splitting::Tensor& tensor = splitting.tensors[which];
  const SplitRows& to = tensor.to;
  // In 32 bits, which divide faster; a launch has fewer CTAs than 2^31.
  const std::uint32_t index = blockIdx.x / static_cast<std::uint32_t>(splitting.count);
  const std::uint32_t head = index / static_cast<std::uint32_t>(to.longest);
  const std::uint32_t entries = static_cast<std::uint32_t>(call.problem.batch);
  const std::int64_t tile = index - head * static_cast<std::uint32_t>(to.longest);
  const std::int64_t b = head % entries, h = head / entries;
  if (h >= to.heads) return wait_for_previous_kernel();  // this kernel must not end before that one
  const Sequence sequence = call.sequence(b);
  const bool queries = to.side == Side::queries;
  const std::int64_t length = queries ? sequence.length_q : sequence.length_k;
  const std::int64_t first = tile * tile_rows;
  if (first >= length) return wait_for_previous_kernel();  // this kernel must not end before that one

  const Rows& rows = tensor.rows;
  const int dims = tensor.dims;
  const bool aligned = aligned_fours(rows);
  const std::int64_t first_row = (queries ? sequence.first_q : sequence.first_k) + first;
  const int row = static_cast<int>(threadIdx.x) / lanes;
  const int chunk = static_cast<int>(threadIdx.x) % lanes;
  float x[rounds][8];
  float largest = 0;
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int r = row + round * step;
    const bool present = first + r < length;
    const auto* from = reinterpret_cast<const float*>(rows.at(b, h, first_row + (present ? r : 0)));
    load_eight(x[round], from, chunk * 8, present ? dims : 0, aligned);
#pragma unroll
    for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fabsf(x[round][n]));
  }
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int r = row + round * step;
    row_work.template row<lanes>(call, {which, b, h, first + r, first_row + r, chunk}, x[round],
                                 first + r < length);
  }
  __shared__ int bits, norm_bits;
  __shared__ unsigned all_losses[3];
  __shared__ int some_row_loses;
  if (threadIdx.x == 0) bits = norm_bits = some_row_loses = 0;
  if (threadIdx.x < 3) all_losses[threadIdx.x] = 0;
  __syncthreads();  // the shared numbers are 0
  raise_by_warp(&bits, largest);
  __syncthreads();  // `bits` has the maximum of all warps
  const int exponent = exponent_for(__int_as_float(bits));
  const float power = power_of_two(exponent);

  const std::int64_t place = to.first(call, b, h) + tile;
  std::byte* tile_gmem = to.data + place * to.tile_bytes;
  bool loses = false;
  float norm = 0;  // the largest squared norm of a row, as scaled
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const int r = row + round * step;
    uint4 chunks[parts];
    loses |= split_eight<parts>(chunks, x[round], power);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      *reinterpret_cast<uint4*>(tile_gmem + part * tile_rows * Tile::row_bytes + Tile::offset(r, chunk)) =
          chunks[part];
    }
    if constexpr (!RowWork::norms) continue;
    norm = fmaxf(norm, row_squares<lanes>(x[round], power));
  }
  if constexpr (RowWork::norms) raise_by_warp(&norm_bits, norm);
  if (__any_sync(~0u, loses)) {
    Losses losses;
    bool row_loses = false;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      count_losses<parts>(losses, x[round], power);
      if constexpr (parts == 2) row_loses |= row_loses_digits<lanes>(x[round], power);
    }
    if (__any_sync(~0u, row_loses) && threadIdx.x % 32 == 0) atomicOr(&some_row_loses, 1);
    add_by_warp(all_losses, losses);
  }
  __syncthreads();  // the norm and the counts of all warps are there
  const Losses all{{all_losses[0], all_losses[1], all_losses[2]}};
  const bool unfit = all.harmful() || some_row_loses != 0 || sequence.length_k <= few_keys ||
                     sequence.length_q < RowWork::few_queries;
  if (threadIdx.x == 0) {
    const bool zero = !RowWork::norms && bits == 0;
    to.exponents[place] = RowWork::marks_tiles && unfit ? unfit_tile : zero ? zero_tile : exponent;
    if constexpr (RowWork::norms) {
      to.norms[place] = sqrtf(__int_as_float(norm_bits)) * power_of_two(-exponent);
    }
  }
  if constexpr (RowWork::marks_tiles) return;
  wait_for_previous_kernel();  // it cleared the marks
  if (threadIdx.x == 0 && unfit) {
    tensor.unfit[b * to.heads + h] = 1;
    *splitting.any_unfit = 1;
  }
#endif
}

template <int dim, int tile_rows, int parts, typename Tile = SwizzledTile<dim>, typename RowWork = NoRowWork>
void split(const AttentionCall& call, const Splitting& splitting, cudaStream_t stream,
           const RowWork& row_work = {}) {
  std::int64_t most = 0;
  for (int n = 0; n < splitting.count; ++n) {
    const SplitRows& to = splitting.tensors[n].to;
    most = std::max(most, to.heads * to.longest);
  }
  launch<split_tiles<dim, tile_rows, parts, Tile, RowWork>>(
      {.name = "tilewise mma, splitting",
       .blocks = splitting.count * call.problem.batch * most,
       .threads = split_threads<RowWork>(tile_rows * Tile::chunks),
       .stream = stream,
       .early = !RowWork::marks_tiles && has_pdl(call.problem.device)},
      call, splitting, row_work);
}

}  // namespace tilewise::cuda::mma_f32
