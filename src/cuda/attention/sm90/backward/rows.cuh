#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/common/backward/far_rows.cuh"
#include "cuda/attention/sm90/backward/walk.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::wgmma_backward {

// The small kernels before and after the tile kernel. Each launches before the previous one has ended (PDL).

inline constexpr int row_threads = 256;

template <typename T>
__device__ __forceinline__ float dot_of_eight(const uint4& a, const uint4& b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 p = unpack<T>(x[n]), q = unpack<T>(y[n]);
    sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
  }
  return sum;
}

/// The number of query tiles of all heads.
__device__ inline std::int64_t query_tiles(const Sizes& sizes, const Workspace& workspace) {
  return (sizes.packed ? 1 : std::int64_t{sizes.batch}) * sizes.heads_q * workspace.tiles;
}

/// Computes the values of all rows, padding included, with 8 to 32 lanes per row. Also clears dQ's sums and
/// the counters. A CTA takes a query tile at a time, and all its loads of O and dO are under way at once.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(row_threads) delta_kernel(const __grid_constant__ DeltaParams params) {
  constexpr Config c = Table::rows[row];
  constexpr int lanes = c.dim_v > 128 ? 32 : c.dim_v > 64 ? 16 : 8;
  constexpr int at_once = row_threads / lanes, parts = c.queries / at_once;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Sizes& sizes = params.sizes;
  const Workspace& workspace = params.workspace;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % lanes;
  const bool reads = !params.delta.wanted && lane * 8 < sizes.dim_v;
  const std::int64_t tiles = query_tiles(sizes, workspace);
  for (std::int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    if (workspace.dq != nullptr) {
      auto* dq = reinterpret_cast<float4*>(workspace.dq + number * (c.dim * c.queries));
      for (int n = thread; n < c.dim * c.queries / 4; n += row_threads) dq[n] = {};
    }
    if (workspace.ticket != nullptr) {
      if (number == 0 && thread == 0) *workspace.ticket = 0;
      for (int n = thread; n < c.dq_chunks(); n += row_threads)
        workspace.added[number * c.dq_chunks() + n] = 0;
    }
    const QueryTile<c.queries> tile(sizes, workspace.tiles, static_cast<std::uint32_t>(number));
    const int count = tile.count();
    const auto at = [&](const Rows& of, int r) {
      return of.at(tile.entry.place, tile.head_q, tile.entry.first_q + tile.first_query() + r);
    };
    const auto value = [&](const Rows& of, int r) { return *reinterpret_cast<const float*>(at(of, r)); };
    uint4 o[parts] = {}, d_o[parts] = {};
    float lse[parts];
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int r = part * at_once + thread / lanes;
      lse[part] = r < count ? value(params.lse, r) : minus_infinity;
      if (!reads || r >= count) continue;
      o[part] = *reinterpret_cast<const uint4*>(at(params.o, r) + lane * 16);
      d_o[part] = *reinterpret_cast<const uint4*>(at(params.d_o, r) + lane * 16);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int r = part * at_once + thread / lanes;
      float delta = dot_of_eight<T>(o[part], d_o[part]);
#pragma unroll
      for (int other = lanes / 2; other > 0; other /= 2) delta += __shfl_xor_sync(~0u, delta, other);
      if (lane != 0) continue;
      if (r < count && params.delta.wanted) delta = value(params.delta, r);
      if (r < count && params.d_lse.wanted) delta -= value(params.d_lse, r);
      const bool empty = lse[part] == minus_infinity;
      const float factor = c.general ? 1.0f : c.preload ? -1.0f / params.score_scale : log2e;
      const float none = c.preload && params.score_scale > 0 ? minus_infinity : -minus_infinity;
      const std::int64_t index = number * c.queries + r;
      workspace.lse[index] = empty ? none : lse[part] * factor;
      workspace.delta[index] = empty ? 0.0f : delta;
      if constexpr (c.general) workspace.offset[index] = 0;
    }
  }
}

/// Computes the softmax of rows whose LSE is too inexact (far_rows.cuh). One warp per row.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(row_threads)
    far_rows_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ Sizes sizes,
                    const __grid_constant__ Workspace workspace) {
  constexpr Config c = Table::rows[row];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t index = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (index >= query_tiles(sizes, workspace) * c.queries || !is_far(workspace.lse[index])) return;
  const QueryTile<c.queries> tile(sizes, workspace.tiles, static_cast<std::uint32_t>(index / c.queries));
  const int query = tile.first_query() + static_cast<int>(index % c.queries);
  const FarSoftmax softmax = far_softmax<T>(call, tile.entry.b, tile.head_q, query, lane);
  __syncwarp();  // all lanes have read the LSE, which lane 0 overwrites
  if (lane != 0 || !(softmax.sum > 0)) return;
  workspace.lse[index] = softmax.top;
  workspace.offset[index] = -log2f(softmax.sum);
}

/// Rounds dQ from its f32 sums. One CTA per tile. Rows pass through shared memory, so that they are written
/// in 16 bytes at a time.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(row_threads) dq_kernel(const __grid_constant__ DqParams params) {
  constexpr Config c = Table::rows[row];
  constexpr int chunks = c.dim / 8;
  __shared__ __align__(16) uint4 rows_smem[c.queries * (chunks + 1)];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Sizes& sizes = params.sizes;
  const QueryTile<c.queries> tile(sizes, params.workspace.tiles, blockIdx.x);
  const int count = tile.count();
  const float* from = params.workspace.dq + std::int64_t{blockIdx.x} * (c.dim * c.queries);
  std::byte* to =
      params.dq.at(tile.entry.place, tile.head_q, std::int64_t{tile.entry.first_q} + tile.first_query());
  const bool is_f32 = params.dq.dtype == DType::f32;  // for a piece of a whole
  for (int index = static_cast<int>(threadIdx.x); index < c.queries * chunks; index += row_threads) {
    const int r = index % c.queries, chunk = index / c.queries;
    const float* first = from + c.dq_offset(r / c.dq_queries(), chunk / 2) + r % c.dq_queries() / 8 * 128 +
                         r % 8 / 2 * 4 + chunk % 2 * 2 + r % 2;
    float x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = first[n * 16] * params.scale;
    if (!is_f32) {
      rows_smem[r * (chunks + 1) + chunk] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                                             pack<T>(x[6], x[7])};
    } else if (r < count && chunk * 8 < sizes.dim_qk) {
      auto* eight = reinterpret_cast<float4*>(to + r * params.dq.stride_s * 4 + chunk * 32);
      eight[0] = {x[0], x[1], x[2], x[3]};
      eight[1] = {x[4], x[5], x[6], x[7]};
    }
  }
  if (is_f32) return;
  __syncthreads();  // all rows are stored
  for (int index = static_cast<int>(threadIdx.x); index < c.queries * chunks; index += row_threads) {
    const int r = index / chunks, chunk = index % chunks;
    if (r >= count || chunk * 8 >= sizes.dim_qk) continue;
    *reinterpret_cast<uint4*>(to + r * params.dq.stride_s * 2 + chunk * 16) =
        rows_smem[r * (chunks + 1) + chunk];
  }
}

/// Adds the splits' dK and dV, in order. A thread has eight dims of a row.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads) join_splits_kernel(const __grid_constant__ JoinParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto join = [&](const Rows& to, const float* from, int dims, std::int64_t index) {
    const int chunks = dims / 8, chunk = static_cast<int>(index % chunks);
    const std::int64_t row = index / chunks % params.rows, head = index / chunks / params.rows;
    const float* first = from + (head * params.splits * params.rows + row) * dims + std::int64_t{chunk} * 8;
    float x[8] = {};
    for (int split = 0; split < params.splits; ++split) {
      const auto* four = reinterpret_cast<const float4*>(first + split * params.rows * dims);
      const float4 a = four[0], b = four[1];
      const float y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += y[n];
    }
    std::byte* at = to.at(head / params.heads_kv, head % params.heads_kv, row);
    const auto store_halves = [&]<typename T>(T) {
      *reinterpret_cast<uint4*>(at + chunk * 16) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                                    pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
    };
    if (to.dtype == DType::f16) return store_halves(__half{});
    if (to.dtype == DType::bf16) return store_halves(__nv_bfloat16{});
    auto* eight = reinterpret_cast<float4*>(at + chunk * 32);  // for a piece of a whole
    eight[0] = {x[0], x[1], x[2], x[3]};
    eight[1] = {x[4], x[5], x[6], x[7]};
  };
  const std::int64_t all = params.heads * params.rows, threads = std::int64_t{gridDim.x} * row_threads;
  const std::int64_t dk_chunks = params.dk.wanted ? all * (params.dim_qk / 8) : 0;
  const std::int64_t dv_chunks = params.dv.wanted ? all * (params.dim_v / 8) : 0;
  for (std::int64_t n = std::int64_t{blockIdx.x} * row_threads + threadIdx.x; n < dk_chunks + dv_chunks;
       n += threads) {
    n < dk_chunks ? join(params.dk, params.split_dk, params.dim_qk, n)
                  : join(params.dv, params.split_dv, params.dim_v, n - dk_chunks);
  }
}

/// dsinks[h] = −Σ exp(sink − LSE)·delta over the rows of a head, in one order. One CTA per head.
template <typename Table, int row>
__global__ void __launch_bounds__(row_threads) sink_kernel(const __grid_constant__ SinkParams params) {
  constexpr Config c = Table::rows[row];
  __shared__ double sums_smem[row_threads];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Sizes& sizes = params.sizes;
  const Workspace& workspace = params.workspace;
  const int head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const auto sink = static_cast<float>(params.sinks.at(0, head));
  const std::int64_t count = std::int64_t{workspace.tiles} * c.queries;
  double sum = 0;  // there are many rows, and where a sink has all the weight, their terms are exact
  for (int b = 0; b < (sizes.packed ? 1 : sizes.batch); ++b) {
    const std::int64_t first = (std::int64_t{b} * sizes.heads_q + head) * count;
    for (std::int64_t n = first + thread; n < first + count; n += row_threads) {
      const float lse = workspace.lse[n];  // see Workspace
      const float weight = c.general   ? exp2f(fmaf(sink - lse, log2e, workspace.offset[n]))
                           : c.preload ? exp2f(fmaf(sink, log2e, lse * params.unit))
                                       : exp2f(fmaf(sink, log2e, -lse));
      sum -= static_cast<double>(weight * workspace.delta[n]);
    }
  }
  sums_smem[thread] = sum;
  __syncthreads();  // all threads' sums are stored
  for (int half = row_threads / 2; half > 0; half /= 2) {
    if (thread < half) sums_smem[thread] += sums_smem[thread + half];
    __syncthreads();  // the sums of this step are stored
  }
  if (thread == 0) params.dsinks[head * params.stride] = static_cast<float>(sums_smem[0]);
}

/// Writes each row of query blocks' entries to the lists of the key blocks. One warp per row. Until
/// list_blocks_kernel() compacts a list, its entry n is that of query block n, and negative where that one
/// does not list the key block. A block that is listed twice, once as full, is full.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads)
    scatter_blocks_kernel(const __grid_constant__ BlockView view, const __grid_constant__ BlockLists blocks,
                          int batch, int heads) {
  const std::int64_t index = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto qb = static_cast<int>(index % blocks.query_blocks);
  const std::int64_t h = index / blocks.query_blocks % heads, b = index / blocks.query_blocks / heads;
  if (b >= batch) return;
  const auto note = [&](std::int64_t kb, std::int32_t tile) {
    if (kb < 0 || kb >= blocks.key_blocks) return;
    const std::int64_t at = blocks.row(b, h, kb) * blocks.query_blocks + qb;
    blocks.lists[at] = {qb, tile};
    if (blocks.states != nullptr) blocks.states[at] = tile;
  };
  for (int slot = lane; slot < view.count(b, h, qb); slot += 32) {
    note(view.indices.at(b, h, qb, slot), view.tile(b, h, qb, slot));
  }
  if (view.full_counts.data == nullptr) return;
  __syncwarp();  // full blocks overwrite the others
  for (int slot = lane; slot < view.full_count(b, h, qb); slot += 32) {
    note(view.full_indices.at(b, h, qb, slot), block_full);
  }
}

/// Counts, for each key block, the earlier key blocks that a query block sees. One thread per query block.
/// Runs before the lists are compacted.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads)
    count_blocks_kernel(const __grid_constant__ BlockLists blocks, std::int64_t heads) {
  const std::int64_t index = std::int64_t{blockIdx.x} * row_threads + threadIdx.x;
  if (index >= heads * blocks.query_blocks) return;
  const std::int64_t first =
      index / blocks.query_blocks * blocks.key_blocks * blocks.query_blocks + index % blocks.query_blocks;
  int count = 0;
  for (int kb = 0; kb < blocks.key_blocks; ++kb) {
    const std::int64_t at = first + std::int64_t{kb} * blocks.query_blocks;
    blocks.before[at] = count;
    if (blocks.lists[at].y >= block_full) ++count;
  }
}

/// Packs the tiles of a block mask into bits. A warp makes the words of 32 queries.
template <typename Table, int row>
__global__ void __launch_bounds__(row_threads)
    block_bits_kernel(const __grid_constant__ BlockView view, const __grid_constant__ BlockLists blocks) {
  constexpr Config c = Table::rows[row];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * (row_threads / 32);
  const std::int64_t parts = blocks.one_row ? 1 : std::int64_t{blocks.query_tiles} * (c.queries / 32);
  const std::int64_t count = view.tile_count * blocks.key_tiles * c.kept_words() * parts;
  for (std::int64_t n = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / 32; n < count; n += warps) {
    const auto part = static_cast<int>(n % parts);
    const auto word = static_cast<int>(n / parts % c.kept_words());
    const auto key_tile = static_cast<int>(n / parts / c.kept_words() % blocks.key_tiles);
    const auto tile = static_cast<std::int32_t>(n / parts / c.kept_words() / blocks.key_tiles);
    const std::int64_t key = std::int64_t{key_tile} * c.keys + word * 32 + lane;
    const int queries = blocks.one_row ? 1 : 32;
    std::uint32_t own = 0;
    for (int r = 0; r < queries; ++r) {
      const std::int64_t query = std::int64_t{part} * 32 + r;
      const bool shows = query < view.block_q && key < view.block_k && view.tile_shows(tile, query, key);
      const std::uint32_t bits = __ballot_sync(~0u, shows);
      if (lane == r) own = bits;
    }
    std::uint32_t* to =
        const_cast<std::uint32_t*>(blocks.bits_of(c, tile, part / (c.queries / 32), key_tile));
    if (!blocks.one_row) {
      to[word * c.queries + part % (c.queries / 32) * 32 + lane] = own;
    } else if (lane == 0) {
      to[word] = own;
    }
  }
}

/// Compacts each list in place, from the last query block to the first. One warp per list.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads)
    list_blocks_kernel(const __grid_constant__ BlockLists blocks, std::int64_t rows) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows) return;
  int2* list = blocks.lists + row * blocks.query_blocks;
  // First the entries move to the end of the list, in order. Then the list is reversed.
  int count = 0;
  for (int end = blocks.query_blocks; end > 0; end -= 32) {
    const int at = end - 1 - lane;
    const int2 entry = at >= 0 ? list[at] : int2{-2, block_hidden};
    const bool listed = at >= 0 && entry.y >= block_full;
    const unsigned who = __ballot_sync(~0u, listed);
    const int before = __popc(who & ((1u << lane) - 1));
    __syncwarp();  // all lanes have read their entries, which others overwrite
    if (listed) list[blocks.query_blocks - 1 - count - before] = entry;
    count += __popc(who);
    __syncwarp();  // all entries are written before the next ones are read
  }
  // The last query block is at the end, so entry n moves to query_blocks - 1 - n.
  for (int n = 0; n < (blocks.query_blocks + 1) / 2; n += 32) {
    const int low = n + lane, high = blocks.query_blocks - 1 - low;
    if (low < high) {
      const int2 a = list[low], z = list[high];
      list[low] = z;
      list[high] = a;
    }
  }
  if (lane == 0) blocks.counts[row] = count;
}

/// Copies a mask of any strides to rows that start at multiples of 16 bytes. Each thread writes 16 bytes.
template <typename Element>
__global__ void __launch_bounds__(row_threads)
    align_mask_kernel(const __grid_constant__ MaskView from, const __grid_constant__ MaskView to) {
  constexpr int each = 16 / sizeof(Element);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t chunks = (to.extent[3] + each - 1) / each;
  const std::int64_t count = to.extent[0] * to.extent[1] * to.extent[2] * chunks;
  for (std::int64_t n = std::int64_t{blockIdx.x} * row_threads + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * row_threads) {
    const std::int64_t j = n % chunks * each, i = n / chunks % to.extent[2];
    const std::int64_t bh = n / chunks / to.extent[2];
    const std::int64_t b = bh / to.extent[1], h = bh % to.extent[1];
    alignas(16) Element elements[each];
#pragma unroll
    for (int e = 0; e < each; ++e) {
      elements[e] =
          j + e < to.extent[3] ? *reinterpret_cast<const Element*>(from.at(b, h, i, j + e)) : Element{};
    }
    reinterpret_cast<uint4*>(to.data)[n] = *reinterpret_cast<const uint4*>(elements);
  }
}

/// Clears a mask's gradient, of any strides: the tile kernel does not write that of hidden pairs.
template <typename Unused = void>
__global__ void __launch_bounds__(row_threads) clear_dmask_kernel(const __grid_constant__ MaskView dmask) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t count = dmask.extent[0] * dmask.extent[1] * dmask.extent[2] * dmask.extent[3];
  for (std::int64_t n = std::int64_t{blockIdx.x} * row_threads + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * row_threads) {
    const std::int64_t j = n % dmask.extent[3], i = n / dmask.extent[3] % dmask.extent[2];
    const std::int64_t bh = n / dmask.extent[3] / dmask.extent[2];
    store_element(dmask.at(bh / dmask.extent[1], bh % dmask.extent[1], i, j), dmask.dtype, 0.0f);
  }
}

}  // namespace tilewise::cuda::wgmma_backward
