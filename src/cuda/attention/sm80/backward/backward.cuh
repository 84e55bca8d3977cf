#pragma once

#include "cuda/attention/sm80/backward/backward.h"
#include "cuda/attention/sm80/backward/choice.h"
#include "cuda/attention/sm80/backward/cta.cuh"
#include "cuda/attention/sm80/backward/pairs.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::mma {

// Backward on tensor cores by mma.sync. A CTA keeps a tile of K and V and walks over the Q and dO tiles that
// see it. For each it computes
//
//   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ     recomputed; P and dS follow elementwise
//   dV += Pᵀ·dO, dK += dSᵀ·Q   accumulated in registers
//   dQ += dS·K                 added to global memory in f32
//
// Additions to dQ come in any order, or with `deterministic` in the order of the K tiles.
//
// Where each warp has its own keys (weights_stay), P and dS go from registers into the products for dV and
// dK. Where warps share keys, P and dS pass through shared memory, so that one fragment of dO or Q serves
// more keys.

// The products that read P and dS of a Q tile from shared memory.

/// dV += Pᵀ·dO and dK += dSᵀ·Q for one Q tile.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void add_to_dkv(Cta& cta, const QuerySteps& steps, int stage, int score_stage) {
  using T = typename Cta::T;
  using RowPointer = typename Cta::RowPointer;
  using ScorePointer = typename Cta::ScorePointer;
  constexpr int key_tiles = c.dkv_key_tiles();
  constexpr int dim_tiles = c.dkv_dim_tiles();
  const WarpPlace<c.dim_warps> place(cta.warp);
  const int first_key = place.m * key_tiles * 16;
  const int first_dim = place.n * dim_tiles;
  const auto address = [](const std::byte* smem) { return Cta::address(smem); };
  const auto fragments_of = [&](const std::byte* smem) {
    return a_by_rows<key_tiles>(ScorePointer::by_rows(address(smem)).from(first_key, 0));
  };
  multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
      cta.dv, fragments_of(cta.p_at(score_stage)),
      b_transposed(RowPointer::by_rows(address(cta.d_o_smem + stage * c.query_bytes())).from(0, first_dim)));
  if (!cta.adds_dk(steps)) return;
  multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
      cta.dk, fragments_of(cta.ds_at(score_stage)),
      b_transposed(RowPointer::by_rows(address(cta.q_smem + stage * c.query_bytes())).from(0, first_dim)));
}

/// Waits until the CTAs of the K tiles before this one have added to a tile of dQ.
template <typename Cta>
__device__ __forceinline__ void await_tile(const Cta& cta, const QuerySteps& steps) {
  if (cta.lane == 0) {
    std::uint32_t* flag = cta.space.order.done + cta.dq_tile(steps);
    const OrderWords words = cta.order_words(steps);
    await_flag(flag, words.before);
    if (cta.warp == 0) *cta.held_smem = {flag, words.after};
  }
  __syncwarp();  // the whole warp sees what lane 0 saw
}
/// Lets the CTA of the next K tile add to the dQ tile that this CTA held. The caller passed a barrier after
/// all its warps added to that tile.
template <typename Cta>
__device__ __forceinline__ void release_tile(const Cta& cta) {
  if (threadIdx.x != 0 || cta.held_smem->flag == nullptr) return;
  raise_flag(cta.held_smem->flag, cta.held_smem->word);
  cta.held_smem->flag = nullptr;
}

/// dQ += dS·K for one Q tile.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void add_to_dq(const Cta& cta, const QuerySteps& steps, int score_stage) {
  using T = typename Cta::T;
  using RowPointer = typename Cta::RowPointer;
  using ScorePointer = typename Cta::ScorePointer;
  constexpr int query_tiles = c.dq_query_tiles();
  constexpr int dim_tiles = c.dq_dim_tiles();
  const BackwardSpace& space = cta.space;
  if (space.dq.data == nullptr) return;
  const WarpPlace<c.dq_dim_warps> place(cta.warp);
  const int first_query = place.m * query_tiles * 16;
  const int first_dim = place.n * dim_tiles;
  Accumulator<query_tiles, dim_tiles> dq = {};
  const auto ds = ScorePointer::by_columns(Cta::address(cta.ds_at(score_stage)));
  multiply_tiles<T, c.keys / 16, query_tiles, dim_tiles>(
      dq, a_transposed<query_tiles>(ds.from(0, first_query / 16)),
      b_transposed(RowPointer::by_rows(Cta::address(cta.k_smem)).from(0, first_dim)), Nothing{}, [&] {
        if (space.order.kept()) await_tile(cta, steps);  // registers are free here
      });
  const int rows = cta.query_count(steps, cta.first_query(steps)) - first_query;
  const std::int64_t tile = cta.dq_tile(steps) + first_query / 16;
  float* first_dq =
      space.dq.data + (tile * space.dq.eights + 2 * first_dim) * DqAccumulator::fragment + 4 * cta.lane;
  const int present = space.dq.eights - 2 * first_dim;
  const auto add = [&](int m, int n) {
    const float(&four)[4] = dq[m][n];
    add_4(first_dq + (m * space.dq.eights + n) * DqAccumulator::fragment,
          {four[0], four[1], four[2], four[3]});
  };
  if (rows >= 16 * query_tiles && present >= 2 * dim_tiles) {
#pragma unroll
    for (int m = 0; m < query_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * dim_tiles; ++n) add(m, n);
    }
  } else {
#pragma unroll
    for (int m = 0; m < query_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * dim_tiles; ++n) {
        if (16 * m < rows && n < present) add(m, n);
      }
    }
  }
}

/// Writes a lane's part of dK or dV, times `factor`, to its tile in shared memory.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void stage_dkv(const Cta& cta, std::byte* to_smem,
                                          const typename Cta::DkvAccumulator& sum, float factor) {
  using Tile = typename Cta::RowTile;
  const WarpPlace<c.dim_warps> place(cta.warp);
  const int first_key = place.m * c.dkv_key_tiles() * 16 + cta.lane / 4;
#pragma unroll
  for (int m = 0; m < c.dkv_key_tiles(); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 2 * c.dkv_dim_tiles(); ++n) {
        const int chunk = place.n * 2 * c.dkv_dim_tiles() + n;
        *reinterpret_cast<std::uint32_t*>(to_smem + Tile::offset(first_key + 16 * m + 8 * half, chunk) +
                                          4 * (cta.lane % 4)) =
            pack<typename Cta::T>(sum[m][n][2 * half] * factor, sum[m][n][2 * half + 1] * factor);
      }
    }
  }
}
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void store_rows(const Cta& cta, const Rows& rows, int dims,
                                           const std::byte* from_smem) {
  using Tile = typename Cta::RowTile;
  if (!rows.wanted) return;
  const bool aligned = !Cta::general || aligned_chunks(rows);
  std::byte* first = row_of_halves(rows, cta.b, cta.h, cta.first_key_row());
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < c.keys * Tile::chunks; index += c.threads()) {
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (row >= cta.key_count || chunk * 8 >= dims) continue;
    store_eight(first + row * rows.stride_s * 2, chunk * 8, dims, aligned,
                *reinterpret_cast<const uint4*>(from_smem + Tile::offset(row, chunk)));
  }
}
/// Writes the partial dK or dV of this CTA's share of the queries, in f32.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void store_share(const Cta& cta, float* to, int dims,
                                            const typename Cta::DkvAccumulator& sum) {
  if (to == nullptr) return;
  const WarpPlace<c.dim_warps> place(cta.warp);
  const std::int64_t floats = KeyShares::row_floats(dims);
  const std::int64_t first_row = cta.facts_smem->share * cta.space.shares.keys +
                                 BackwardSpace::key_row(cta.call, cta.b, cta.h, cta.first_key_row());
  const int first_dim = place.n * c.dkv_dim_tiles() * 16 + 2 * (cta.lane % 4);
#pragma unroll
  for (int m = 0; m < c.dkv_key_tiles(); ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = place.m * c.dkv_key_tiles() * 16 + 16 * m + 8 * half + cta.lane / 4;
      if (r >= cta.key_count) continue;
      float* row = to + (first_row + r) * floats + first_dim;
#pragma unroll
      for (int n = 0; n < 2 * c.dkv_dim_tiles(); ++n) {
        if (first_dim + 8 * n >= floats) continue;
        *reinterpret_cast<float2*>(row + 8 * n) = {sum[m][n][2 * half], sum[m][n][2 * half + 1]};
      }
    }
  }
}
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void store_shares(const Cta& cta) {
  store_share<c>(cta, cta.space.shares.dk, cta.dim_qk, cta.dk);
  store_share<c>(cta, cta.space.shares.dv, cta.dim_v, cta.dv);
}

/// Writes dK and dV through shared memory. The caller passed a barrier after the last read of K and V there.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void store_dkv(const Cta& cta) {
  const float p_scale = cta.keep_scale() / static_cast<float>(1 << p_scale_bits<typename Cta::T>);
  stage_dkv<c>(cta, cta.k_smem, cta.dk, static_cast<float>(cta.call.scale) * cta.scale.down);
  stage_dkv<c>(cta, cta.v_smem, cta.dv, p_scale);
  __syncthreads();  // both tiles are in shared memory
  store_rows<c>(cta, cta.call.dk, cta.dim_qk, cta.k_smem);
  store_rows<c>(cta, cta.call.dv, cta.dim_v, cta.v_smem);
}

/// P and dS of one Q tile.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void compute_p_and_ds(Cta& cta, const QuerySteps& steps, int stage,
                                                 int score_stage) {
  const bool edge = cta.edge(steps);
  constexpr int queries_each = c.queries / (c.warps / c.key_warps);
  const int own_first = cta.warp % (c.warps / c.key_warps) * queries_each;
#pragma unroll 1
  for (int n = 0; n < queries_each; n += c.queries_at_once) {
    compute_p_and_ds_step<c>(cta, steps, edge, stage, score_stage, own_first + n);
  }
}

/// The mainloop: P and dS of a Q tile, then the products that read them.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void mainloop(Cta& cta, QuerySteps steps) {
  cta.load_queries(steps, 0);
  commit_copies();
#pragma unroll 1
  for (int stage = 0; steps.more(); stage ^= 1) {
    wait_copies<0>();
    __syncthreads();  // the Q tile has arrived; all warps are done with the last one and its dS
    if (cta.space.order.kept()) release_tile(cta);  // the last tile
    const QuerySteps next = cta.after(steps);
    if (next.more()) cta.load_queries(next, stage ^ 1);
    commit_copies();
    compute_p_and_ds<c>(cta, steps, stage, 0);
    __syncthreads();  // P and dS are in shared memory
    if constexpr (!c.weights_stay) add_to_dkv<c>(cta, steps, stage, 0);
    add_to_dq<c>(cta, steps, 0);
    steps = next;
  }
}

/// The same with P and dS computed one Q tile ahead of the products that read them. Half of the warps compute
/// P and dS first while the others multiply, then they swap: so the softmax of one of a scheduler's two warps
/// overlaps with the products of the other. With two stages, the rows of a tile must be free before the next
/// load starts. Only dV and dK read them by then, so these products come first.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void mainloop_ahead(Cta& cta, QuerySteps next) {
  static_assert(!c.weights_stay);
  cta.load_queries(next, 0);
  commit_copies();
  QuerySteps now{};          // the tile of the products; none yet
  int stage = c.stages - 1;  // of `now`
  int score_stage = 1;
#pragma unroll 1
  while (now.more() || next.more()) {
    wait_copies<0>();
    // The next tile and P and dS of this one are there; all warps are done with the last tile and its P and
    // dS.
    __syncthreads();
    if (cta.space.order.kept()) release_tile(cta);  // the last tile
    const int next_stage = stage == c.stages - 1 ? 0 : stage + 1;
    const int later_stage = next_stage == c.stages - 1 ? 0 : next_stage + 1;
    const QuerySteps later = next.more() ? cta.after(next) : next;
    if constexpr (c.stages == 2) {
      if (now.more()) add_to_dkv<c>(cta, now, stage, score_stage);
      __syncthreads();  // all warps are done with the rows and P of this tile
      if (later.more()) cta.load_queries(later, later_stage);
      commit_copies();
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      // These selections keep what depends on the tiles inside this loop, where the compiler would hoist it.
      const bool making = (half == 0) == (cta.warp < c.warps / 2);
      const QuerySteps own = making ? next : now;
      const QuerySteps loaded = making ? now : later;
      if (making) {
        if (own.more()) compute_p_and_ds<c>(cta, own, next_stage, score_stage ^ 1);
        continue;
      }
      if constexpr (c.stages > 2) {
        // Half of the warps load at a time, while the others multiply.
        if (loaded.more()) cta.load_queries(loaded, later_stage);
        commit_copies();
        if (own.more()) add_to_dkv<c>(cta, own, stage, score_stage);
      }
      if (own.more()) add_to_dq<c>(cta, own, score_stage);
    }
    now = next;
    next = later;
    stage = next_stage;
    score_stage ^= 1;
  }
}

/// Adds what all queries of this CTA's share give to dK, dV and dQ.
template <BackwardConfig c, typename Cta>
__device__ __forceinline__ void add_all_queries(Cta& cta, int share) {
  if (threadIdx.x == 0) {
    *cta.facts_smem = GroupFacts::of<c.queries, c.keys>(cta.call, cta.grid, cta.space, cta.b, cta.h,
                                                        cta.first_key, cta.key_count, share);
    *cta.held_smem = {};
  }
  __syncthreads();  // the facts are there
  const QuerySteps steps = cta.begin();
  if (!steps.more()) return;
  cta.load_keys();
  if constexpr (c.pairs_ahead) {
    mainloop_ahead<c>(cta, steps);
  } else {
    mainloop<c>(cta, steps);
  }
}

/// The number of this CTA, which says its K tile and its share of the queries. CTAs that wait for one another
/// take numbers in the order in which they start, so that none waits for one that has not started.
__device__ __forceinline__ std::uint32_t cta_index(const Order& order, CtaFacts& facts_smem) {
  if (!order.kept()) return blockIdx.x;
  if (threadIdx.x == 0) facts_smem.index = atomicAdd(order.ticket, 1u);
  __syncthreads();  // the number is there
  return facts_smem.index;
}

/// The kernel of one row of the tuning table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardGrid grid,
                    const __grid_constant__ BackwardSpace space) {
#if __CUDA_ARCH__ >= 800
  constexpr BackwardConfig c = Table::rows[row];
  if constexpr (runs_in_code(c.shared_bytes(Table::general))) {
    TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
    join_pdl_chain();  // the row values are there, and dQ's accumulator is 0
    using Cta = BackwardCta<T, c, Table::general>;
    const std::uint32_t index = cta_index(space.order, *Cta::facts_of(shared));
    const auto shares = static_cast<std::uint32_t>(space.shares.count);
    const Turn turn = grid.turns.turn(index / shares);
    Cta cta(call, grid, space, shared, turn);
    if (cta.key_count <= 0) return;
    add_all_queries<c>(cta, static_cast<int>(index % shares));
    __syncthreads();  // all warps are done with K and V
    if (space.order.kept()) release_tile(cta);
    space.shares.count > 1 ? store_shares<c>(cta) : store_dkv<c>(cta);
  }
#endif
}

// From a call to the row of the tuning table that it runs by.

template <typename T, typename Table, int row>
void run_backward_row(const AttentionCall& call, const BackwardSpace& space, int multiprocessors,
                      cudaStream_t stream) {
  constexpr BackwardConfig c = Table::rows[row];
  const BackwardGrid grid = BackwardGrid::of(call, c, multiprocessors);
  launch<backward_kernel<T, Table, row>>({.name = "tilewise mma backward",
                                          .blocks = grid.count() * space.shares.count,
                                          .threads = c.threads(),
                                          .shared_bytes = c.shared_bytes(Table::general),
                                          .stream = stream,
                                          .early = has_pdl(call.problem.device)},
                                         call, grid, space);
}

/// Runs row `chosen`; all rows of the table are compiled.
template <typename T, typename Table>
void run_chosen_backward(const AttentionCall& call, const BackwardSpace& space, const Context& context,
                         int chosen) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  with_row<Table>(chosen,
                  [&](auto row) { run_backward_row<T, Table, row>(call, space, multiprocessors, stream); });
}

}  // namespace tilewise::cuda::mma
