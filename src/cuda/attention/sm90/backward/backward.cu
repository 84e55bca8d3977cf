#include "cuda/attention/sm90/backward/backward.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/attention/common/backward/shares.h"
#include "cuda/attention/sm90/backward/block.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_backward {

// The kernel over tiles of backward by wgmma; what comes before and after it is mma's. A block keeps 128
// keys, 64 a warpgroup, and walks over the queries that see them, 64 at a time. Pairs are held transposed, a
// row a key, so that they come out of k·qᵀ and v·d_oᵀ in the registers in which they go into dv and dk. For
// dq, which sums over keys, score gradients pass through shared memory, and that product is a tile behind: so
// the warpgroups need not keep step.
//
//   tensor cores   dv dk of 0 │ q·k 1 │ d_o·v 1 │ dq of 0 │ dv dk of 1 │ q·k 2 │ ...
//   lanes          copies ahead       │ weights 1 │ score gradients 1 │ dq of 0 to memory │ ...

// What pairs add to the gradients.

/// += pairsᵀ · rows, of 64 keys by all dims, from fragments in registers and queries' rows in shared memory.
template <typename T, int dim>
__device__ __forceinline__ void add_to_keys(float (&sums)[dim / 2], const Fragments& pairs,
                                            TileDescriptor rows, bool add) {
#pragma unroll
  for (int step = 0; step < Config::queries / 16; ++step) {
    WarpgroupProduct<T, dim>::from_registers(sums, pairs[step], rows + step * 128, add || step > 0);
  }
}

/// dq of a tile, 64 queries by 64 dims.
template <typename T>
__device__ __forceinline__ void start_dq(Pairs& dq, TileDescriptor dscores, TileDescriptor keys) {
#pragma unroll
  for (int step = 0; step < Config::keys / 16; ++step) {
    WarpgroupProduct<T, 64>::template from_shared<1, 1>(dq, dscores + step * 128, keys + step * 128,
                                                        step > 0);
  }
}

/// dq's sums, of a warp's 16 queries, to where they wait to be added in global memory.
template <typename Block>
__device__ __forceinline__ void stage_dq(const Block& block, const Pairs& dq) {
  float* to = block.dq_smem + block.warp() * (8 * mma::QuerySums::fragment) + 4 * block.lane();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    *reinterpret_cast<float4*>(to + j * mma::QuerySums::fragment) = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                                                                     dq[4 * j + 3]};
  }
}
/// Has them added, by one lane. They are of eights of dims from `first_eight` on.
template <typename Block>
__device__ __forceinline__ void send_dq(const Block& block, const TileFacts& queries, int first_eight) {
  const mma::QuerySums& sums = block.space.dq;
  const int tile = block.warp() % 4;
  const int eights = min(8, sums.eights - first_eight);
  if (sums.data == nullptr || 16 * tile >= queries.count || eights <= 0) return;
  add_floats(sums.data + ((queries.sums + tile) * sums.eights + first_eight) * mma::QuerySums::fragment,
             block.dq_smem + block.warp() * (8 * mma::QuerySums::fragment),
             eights * mma::QuerySums::fragment * 4);
  commit_stores();
}

/// A lane's sums, times a factor, to a tile in shared memory.
template <typename Block, int n>
__device__ __forceinline__ void stage_own(const Block& block, std::byte* to_smem, const float (&sums)[n],
                                          float factor) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block.first_own_key() + block.lane() / 4 + 8 * half;
      *reinterpret_cast<std::uint32_t*>(to_smem + Block::KeyPanels::offset(row, j) + 4 * (block.lane() % 4)) =
          pack<typename Block::T>(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
    }
  }
}
template <typename Block>
__device__ __forceinline__ void store_rows(const Block& block, const Rows& rows, int dims,
                                           const std::byte* from_smem) {
  using Tile = typename Block::KeyPanels;
  if (!rows.wanted) return;
  std::byte* first = row_of_halves(rows, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < Config::keys * Tile::chunks;
       index += Config::consumer_threads()) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (row >= block.key_count() || chunk * 8 >= dims) continue;
    store_eight(first + row * rows.stride_s * 2, chunk * 8, dims, true,
                *reinterpret_cast<const uint4*>(from_smem + Tile::offset(row, chunk)));
  }
}
/// A share's sums of all rows.
template <typename Block, int n>
__device__ __forceinline__ void store_share(const Block& block, float* to, int dims, const float (&sums)[n]) {
  if (to == nullptr) return;
  const std::int64_t floats = mma::KeyShares::row_floats(dims);
  const std::int64_t first_row =
      block.facts_smem->group.share * block.space.shares.keys +
      BackwardSpace::key_row(block.call, block.facts_smem->b, block.facts_smem->h, block.first_key_row());
  const int first_dim = 2 * (block.lane() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = block.first_own_key() + 8 * half + block.lane() / 4;
    if (r >= block.key_count()) continue;
    float* row = to + (first_row + r) * floats + first_dim;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      if (first_dim + 8 * j >= floats) continue;
      *reinterpret_cast<float2*>(row + 8 * j) = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
    }
  }
}

/// dk and dv from their sums; everyone is done with keys and values.
template <typename Block, int n>
__device__ __forceinline__ void store_own(const Block& block, const float (&dk)[n], const float (&dv)[n]) {
  const BackwardSpace& space = block.space;
  if (space.shares.count > 1) {
    store_share(block, space.shares.dk, block.dim_qk(), dk);
    store_share(block, space.shares.dv, block.dim_v(), dv);
    return;
  }
  constexpr float weight_unit = 1.0f / static_cast<float>(1 << mma::weight_bits<typename Block::T>);
  stage_own(block, block.k_smem, dk, static_cast<float>(block.call.scale) * block.facts_smem->scale.down);
  stage_own(block, block.v_smem, dv, weight_unit);
  sync_some<1, Config::consumer_threads()>();  // the rows are there
  store_rows(block, block.call.dk, block.dim_qk(), block.k_smem);
  store_rows(block, block.call.dv, block.dim_v(), block.v_smem);
}

template <typename T, Config c>
struct Walk {
  using Own = Block<T, c>;
  using OwnSums = float[c.dim / 2];

  Own& block;
  const TileDescriptor k_rows, v_rows;  ///< the warpgroup's 64 keys
  const TileDescriptor k_columns;       ///< of all keys the warpgroup's 64 dims
  OwnSums dk, dv;
  Pairs s, x, dq;
  RowFragments<c.rows_stay ? c.dim : 16> keys, values;
  Fragments weights, dscores;

  __device__ explicit Walk(Own& block_)
      : block(block_),
        k_rows(tile(block.k_smem + block.group() * 64 * 128, Own::KeyPanels::panel_bytes)),
        v_rows(tile(block.v_smem + block.group() * 64 * 128, Own::KeyPanels::panel_bytes)),
        k_columns(tile(block.k_smem + (c.dim > 64 ? block.group() * Own::KeyPanels::panel_bytes : 0),
                       Own::KeyPanels::panel_bytes)) {
    if constexpr (c.rows_stay) {
      load_fragments(block, keys, block.k_smem);
      load_fragments(block, values, block.v_smem);
    }
  }

  static __device__ TileDescriptor tile(const std::byte* smem, int panel_bytes) {
    return describe_tile(Own::address(smem), panel_bytes);
  }
  __device__ TileDescriptor q(int stage) const {
    return tile(block.q_smem + stage * c.query_bytes(), Own::QueryPanels::panel_bytes);
  }
  __device__ TileDescriptor d_o(int stage) const {
    return tile(block.d_o_smem + stage * c.query_bytes(), Own::QueryPanels::panel_bytes);
  }
  __device__ const float* own(const float* values, int stage) const {
    return values + stage * c.queries + 2 * (block.lane() % 4);
  }

  /// Two groups of products: q·k, d_o·v.
  __device__ __forceinline__ void start_pairs(int stage) {
    forget(s);
    forget(x);
    fence_products();
    if constexpr (c.rows_stay) {
      start_product<T, c.dim>(s, keys, q(stage));
      commit_products();
      start_product<T, c.dim>(x, values, d_o(stage));
    } else {
      start_product<T, c.dim, c.keys>(s, k_rows, q(stage));
      commit_products();
      start_product<T, c.dim, c.keys>(x, v_rows, d_o(stage));
    }
    commit_products();
  }
  /// Of head dims to 64 a warpgroup makes dq of every other tile, else half of the dims of all.
  __device__ bool has_dq(int number) const { return c.dim > 64 || number % 2 == block.group(); }
  __device__ __forceinline__ void start_dq(int number) {
    fence_products();
    if (!has_dq(number)) return;
    forget(dq);
    wgmma_backward::start_dq<T>(dq, tile(block.dscores_smem + number % 2 * c.pair_bytes(), c.pair_bytes()),
                                k_columns);
    commit_products();
  }
  /// Waits for what was started before such a product, if there is one.
  __device__ __forceinline__ void await_all_but_dq(int number) const {
    has_dq(number) ? wait_products<1>() : wait_products<0>();
  }
  __device__ void await_dscores(int number) const { wait(block.made_smem + number % 2, number / 2 % 2); }
  /// Score gradients are not needed any more, and dq goes where it is added up.
  __device__ __forceinline__ void finish_dq(int number) {
    block.arrive_once(block.used_smem + number % 2);
    if (!has_dq(number)) return;
    if (block.lane() == 0) wait_stores_read();
    __syncwarp();  // there is room
    stage_dq(block, dq);
    fence_async_proxy();
    __syncwarp();
    if (block.lane() == 0) send_dq(block, block.tile(number), c.dim > 64 ? 8 * block.group() : 0);
  }

  /// Weights and score gradients of the tile whose products are under way.
  __device__ __forceinline__ void make_pairs(int number, int stage, bool last) {
    const TileFacts& queries = block.tile(number);
    // What is in shared memory is asked for early: products keep that busy.
    const int edge = queries.edge;
    OfQueries tops, shifts;
    tops.load(own(block.top_smem, stage));
    wait_products<1>();  // q·k
    pin(s);
    if constexpr (c.turns) sync_with_arrivals(2 + block.group());  // the other one is not at its pairs
    if (edge) hide(block, queries, s);
    weigh<T, 0, 16>(tops, block.unit, s);
    asm volatile("" ::: "memory");  // not before: registers
    shifts.load(own(block.shift_smem, stage));
    weigh<T, 16, 32>(tops, block.unit, s);
    wait_products<0>();  // d_o·v
    pin(x);
    add_shifts<T>(shifts, block.facts_smem->scale.up, x);
    round_pairs<T>(s, x, weights, dscores);
    const int pair_stage = number % 2;
    wait(block.used_smem + pair_stage, number / 2 % 2 ^ 1);
    store_pairs(block, pair_stage, dscores);
    fence_async_proxy();
    block.arrive_once(block.made_smem + pair_stage);
    if (c.turns && (!last || block.group() == 0)) arrive_for_sync(3 - block.group());
    pin(weights);
    pin(dscores);
  }

  __device__ __forceinline__ void none() {
#pragma unroll
    for (int n = 0; n < c.dim / 2; ++n) dk[n] = dv[n] = 0;
  }
  __device__ __forceinline__ void all(int count) {
    forget(dk);
    forget(dv);
    Ring<c.stages> at;
    if (c.turns && block.group() == 1) arrive_for_sync(2);
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
      wait(block.full_smem + at.stage(), at.parity());
      start_pairs(at.stage());
      make_pairs(number, at.stage(), number + 1 == count);
      fence_products();
      add_to_keys<T, c.dim>(dv, weights, d_o(opaque(at.stage())), number > 0);
      add_to_keys<T, c.dim>(dk, dscores, q(opaque(at.stage())), number > 0);
      commit_products();
      if (number > 0) await_dscores(number - 1);
      start_dq(number + 1);          // of the tile before; of the first one nothing
      await_all_but_dq(number + 1);  // dv and dk
      block.arrive_once(block.empty_smem + at.stage());
      wait_products<0>();  // dq
      pin(dq);
      if (number > 0) finish_dq(number - 1);
      at.advance();
    }
    pin(dk);
    pin(dv);
    await_dscores(count - 1);
    start_dq(count - 1);
    wait_products<0>();
    pin(dq);
    finish_dq(count - 1);
    if (block.lane() == 0) wait_stores();
  }
};

/// Brings tiles of queries.
template <typename T, Config c>
__device__ __forceinline__ void load_tiles(const Block<T, c>& block, QuerySteps steps) {
  Ring<c.stages> at;
#pragma unroll 1
  for (int number = 0; steps.more(); ++number) {
    wait(block.empty_smem + at.stage(), at.parity() ^ 1);
    block.load_queries(steps, number, at.stage());
    commit_copies();
    wait_copies<0>();
    fence_async_proxy();
    block.arrive_once(block.full_smem + at.stage());
    steps = block.after(steps);
    at.advance();
  }
}

template <typename T, int row>
__global__ void __launch_bounds__(rows[row].threads(), 1)
    backward_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardBlocks blocks,
                    const __grid_constant__ BackwardSpace space) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Config c = rows[row];
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 1024);
  take_turn_in_chain();
  const auto shares = static_cast<std::uint32_t>(space.shares.count);
  const Turn turn = blocks.turns.turn(blockIdx.x / shares);
  Block<T, c> block(call, blocks, space, shared);
  block.prepare(turn, static_cast<int>(blockIdx.x % shares));
  __syncthreads();  // facts and barriers are there
  if (block.key_count() <= 0) return;
  const QuerySteps steps = block.begin();
  if (block.warp() >= c.warps) {
    keep_registers<c.producer_registers>();
    if (block.warp() < c.warps + c.load_warps) load_tiles(block, steps);
    return;
  }
  take_registers<c.consumer_registers>();
  block.load_keys();
  commit_copies();
  wait_copies<0>();
  fence_async_proxy();
  sync_some<1, c.consumer_threads()>();  // keys and values are there
  Walk<T, c> walk(block);
  steps.more() ? walk.all(steps.left) : walk.none();
  sync_some<1, c.consumer_threads()>();  // everyone is done with keys and values
  store_own(block, walk.dk, walk.dv);
#endif
}

namespace {

int row_of(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  return first_row<Backward>([&](const Config& c) { return c.dim >= dim; });
}

BackwardSpace space_of(const AttentionCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  return {call, context.workspace.data, mma::shares_of(call, rows[row_of(call)].cut(), multiprocessors)};
}

template <typename T, int row>
void run_row(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  constexpr Config c = rows[row];
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto blocks = BackwardBlocks::of(call, c.cut(), multiprocessors);
  launch<backward_kernel<T, row>>({.name = "tilewise wgmma backward",
                                   .blocks = blocks.count() * space.shares.count,
                                   .threads = c.threads(),
                                   .shared_bytes = c.shared_bytes(),
                                   .stream = static_cast<cudaStream_t>(context.stream),
                                   .early = true},
                                  call, blocks, space);
}

template <typename T>
void run(const AttentionCall& call, const BackwardSpace& space, const Context& context) {
  with_row<Backward>(row_of(call), [&](auto row) { run_row<T, row>(call, space, context); });
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call, const Context& context) {
  return space_of(call, context).bytes;
}

void backward(const AttentionCall& call, const Context& context) {
  const BackwardSpace space = space_of(call, context);
  mma::prepare_backward(call, space, context);
  call.problem.dtype == DType::f16 ? run<__half>(call, space, context)
                                   : run<__nv_bfloat16>(call, space, context);
  mma::finish_backward(call, space, context);
}

}  // namespace tilewise::cuda::wgmma_backward
