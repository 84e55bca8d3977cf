#pragma once

#include "cuda/attention/common/f32/query_state.cuh"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/sm80/forward_f32/forward.h"
#include "cuda/attention/sm80/forward_f32/tuning.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::mma_f32 {

// Attention for f32 on tensor cores. A CTA keeps a Q tile and walks over K and V tiles, which were split by
// the kernel before it. A warp has its own queries.

/// Fragments of a warp's queries: kept in registers, or loaded from shared memory for each K tile.
template <auto c, bool stay = c.queries_stay>
struct Queries {
  MatrixPointer<c.dim> at;

  __device__ void load() {}
  __device__ void get(Parts<c> (&a)[c.row_tiles], int step) const {
    load_rows<c, c.query_part_bytes()>(a, at, step);
  }
};
template <auto c>
struct Queries<c, true> {
  MatrixPointer<c.dim> at;
  Parts<c> kept[c.dim / 16][c.row_tiles];

  __device__ void load() {
#pragma unroll
    for (int step = 0; step < c.dim / 16; ++step) load_rows<c, c.query_part_bytes()>(kept[step], at, step);
  }
  __device__ void get(Parts<c> (&a)[c.row_tiles], int step) const {
#pragma unroll
    for (int r = 0; r < c.row_tiles; ++r) {
#pragma unroll
      for (int part = 0; part < c.parts; ++part) {
#pragma unroll
        for (int n = 0; n < 4; ++n) a[r][part][n] = kept[step][r][part][n];
      }
    }
  }
};

/// The state of a CTA: its queries, and a ring of buffers through which K and V tiles pass alternately.
template <auto c>
struct ForwardCta : QueryState<c> {
  using QueryState<c>::call, QueryState<c>::rows, QueryState<c>::place, QueryState<c>::o;
  const SplitRows &k, &v;
  std::byte* q_smem;        ///< parts x [rows, dim]
  std::byte* ring_smem;     ///< buffers x parts x [keys, dim]
  int* exponents_smem;      ///< [rows]
  std::int64_t first_tile;  ///< the sequence's first tile among all
  int tile, end;            ///< the current K tile, and the end of its range

  __device__ ForwardCta(const AttentionCall& call_, const QueryRows& rows_, const SplitRows& k_,
                        const SplitRows& v_, std::byte* shared)
      : QueryState<c>(call_, rows_),
        k(k_),
        v(v_),
        q_smem(shared),
        ring_smem(q_smem + c.parts * c.query_part_bytes()),
        exponents_smem(reinterpret_cast<int*>(ring_smem + c.buffers * c.key_bytes())),
        first_tile(k.first(call, rows.queries.b, rows.head_kv)) {
    const KeyRange range = rows.queries.any(call);
    tile = static_cast<int>(range.first / c.keys);
    end = range.empty() ? tile : static_cast<int>((range.last + c.keys - 1) / c.keys);
  }

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }
  __device__ const std::byte* buffer(int item) const { return ring_smem + item % c.buffers * c.key_bytes(); }

  /// Starts the copy of an item if it exists. Items are K tile, V tile, K tile, V tile and so on.
  __device__ void fetch(int first, int item) const {
    if (first + item / 2 < end) {
      const std::int64_t from_tile = first_tile + first + item / 2;
      const std::byte* from = (item % 2 == 0 ? k : v).data + from_tile * c.key_bytes();
      std::byte* to = ring_smem + item % c.buffers * c.key_bytes();
#pragma unroll
      for (int n = 0; n < c.key_bytes() / 16; n += c.threads()) {
        const int chunk = n + static_cast<int>(threadIdx.x);
        copy_async_16(to + chunk * 16, from + chunk * 16, true);
      }
    }
    commit_copies();
  }

  /// The mainloop over all tiles. Returns whether the queries fit.
  __device__ bool mainloop() {
    const int first = tile;
#pragma unroll
    for (int item = 0; item < c.buffers - 1; ++item) fetch(first, item);
    bool fit = this->template load_queries<SwizzledTile<c.dim>>(q_smem, exponents_smem);
    Queries<c> q{MatrixPointer<c.dim>::by_rows(address(q_smem + place.first_row() * c.row_bytes()))};
    q.load();
    const QueryTile& queries = rows.queries;
    const KeyRange all = queries.all(call);
    const auto seen_first = static_cast<int>(seen_by_warp<c>(*this).first);
    const auto seen_last = static_cast<int>(seen_by_warp<c>(*this).last);
#pragma unroll 1
    for (int item = 0; tile < end; ++tile, item += 2) {
      const int k_exponent = k.exponents[first_tile + tile];
      const int v_exponent = v.exponents[first_tile + tile];
      wait_copies<c.buffers - 2>();
      __syncthreads();  // K has arrived; all warps are done with the last V
      fetch(first, item + c.buffers - 1);
      const int first_key = tile * c.keys;
      const bool seen = first_key < seen_last && first_key + c.keys > seen_first;
      Scores<c> s;
      if (seen) {
        multiply_tile<c, c.key_part_bytes()>(
            s, [&](Parts<c>(&a)[c.row_tiles], int step) { q.get(a, step); }, address(buffer(item)));
      }
      wait_copies<c.buffers - 2>();
      __syncthreads();  // V has arrived; all warps are done with K
      fetch(first, item + c.buffers);
      if (!seen) continue;
      const std::int64_t left = queries.sequence.length_k - first_key;
      const KeyTile keys{first_key, static_cast<int>(min(static_cast<std::int64_t>(c.keys), left))};
      if (first_key < all.first || first_key + c.keys > all.last) hide<c>(call, rows, keys, place, s);
      float scales_log2[c.row_tiles][2];
      this->find_scales_log2(scales_log2, k_exponent);
      this->raise_maxima(s, scales_log2);
      const float factor = o.rescale_for(v_exponent == zero_tile ? o.exponent : v_exponent);
      ScoreFragments<c> p;
      fit &= c.parts == 2 || factor >= least_factor;
      this->exponentiate(p, s, scales_log2, factor);
      add_tile<c, c.key_part_bytes()>(o.sum, p, address(buffer(item + 1)), factor);
    }
    return fit;
  }
};

/// The kernel of one row of the tuning table.
template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const ForwardGrid grid, const SplitRows k,
                   const SplitRows v, const Unfit unfit) {
#if __CUDA_ARCH__ >= 800
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(c.keys == Table::keys && c.parts == Table::parts);
  TILEWISE_DYNAMIC_SHARED(std::byte, shared, 128);
  const QueryRows rows = grid.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return;
  if (unfit.keys[rows.queries.b * call.problem.heads_kv + rows.head_kv] != 0) return;
  ForwardCta<c> cta(call, rows, k, v, shared);
  if (!cta.mainloop()) {
    for (int n = cta.place.lane; n < rows.heads; n += 32) {
      unfit.queries[rows.queries.b * call.problem.heads_q + rows.queries.h + n] = 1;
      *unfit.any = 1;
    }
  }
  cta.finish();
#endif
}

// From a call to the row of the tuning table that it runs by.

/// The dim that a call's head dims are padded to.
template <typename Table>
int table_dim(const AttentionCall& call) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  return smallest<Table>([&](const ForwardConfig& c) { return c.dim >= dim; },
                         [](const ForwardConfig& c) { return c.dim; });
}

template <typename Table>
ForwardSpace space_of(const AttentionCall& call, void* base) {
  return {call, base, Table::keys, Table::parts, table_dim<Table>(call)};
}

/// Splits K and V.
template <typename Table, int dim>
void split_keys(const AttentionCall& call, const ForwardSpace& space, cudaStream_t stream) {
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  split<dim, Table::keys, Table::parts>(
      call,
      {.any_unfit = space.unfit.any,
       .count = 2,
       .tensors = {{call.k, dim_qk, space.k, space.unfit.keys}, {call.v, dim_v, space.v, space.unfit.keys}}},
      stream);
}

template <typename Table, int row>
void run_row(const AttentionCall& call, const ForwardSpace& space, int multiprocessors, cudaStream_t stream) {
  constexpr ForwardConfig c = Table::rows[row];
  clear_marks(space.unfit, stream);
  split_keys<Table, c.dim>(call, space, stream);
  const ForwardGrid grid = ForwardGrid::of(call, c.rows(), multiprocessors);
  launch<forward_kernel<Table, row>>({.name = "tilewise mma forward",
                                      .blocks = grid.count(),
                                      .threads = c.threads(),
                                      .shared_bytes = c.shared_bytes(),
                                      .stream = stream},
                                     call, grid, space.k, space.v, space.unfit);
}

/// The row of the table for a call.
template <typename Table>
int choose_row(const AttentionCall& call, const DeviceProperties& device) {
  const int dim = table_dim<Table>(call);
  const int chosen = choose_row_of<Table>(
      call, [&](const ForwardConfig& c) { return c.dim == dim && c.shared_bytes() <= device.shared_bytes; },
      [&](int row) {
        const auto grid = ForwardGrid::of(call, Table::rows[row].rows(), device.multiprocessors);
        return fill_cost<Table>(row, 4 * grid.count() >= 3 * device.multiprocessors);
      });
  if (chosen < 0) throw DeviceError("tilewise mma forward: too little shared memory for its tiles");
  return chosen;
}

template <typename Table>
Configuration configuration_of(const AttentionCall& call, const Context& context) {
  return {.workspace_bytes = space_of<Table>(call, nullptr).bytes,
          .row = choose_row<Table>(call, device_properties(context.device.index))};
}

/// Runs row `chosen` and returns its workspace; all rows of the table are compiled.
template <typename Table>
ForwardSpace run_chosen(const AttentionCall& call, int chosen, const Context& context) {
  const ForwardSpace space = space_of<Table>(call, context.workspace.data);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  with_row<Table>(chosen, [&](auto row) { run_row<Table, row>(call, space, multiprocessors, stream); });
  return space;
}

}  // namespace tilewise::cuda::mma_f32
