#include "cuda/attention/sm90/forward_f32/forward.h"

#include <algorithm>

#include "cuda/attention/common/f32/query_state.cuh"
#include "cuda/attention/common/tuning_problem.h"
#include "cuda/attention/simt/fused.h"
#include "cuda/attention/sm90/forward_f32/tuning.h"
#include "cuda/attention/sm90/panel_tile.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/tuning_table.h"

namespace tilewise::cuda::wgmma_f32 {

// Attention for f32 by wgmma. Each number is split into parts of 16 bits (common/f32), and the softmax is
// that of the f32 forward on mma. With two parts, each product of a tile takes three products of parts. A
// warpgroup starts all of them and waits; meanwhile the other warpgroup computes its softmax.

using mma_f32::QueryState;
using mma_f32::SplitRows;
using mma_f32::Unfit;

/// The product of part `a` of one operand and part `b` of the other. Products with small parts come first, so
/// that the sum loses less.
struct Term {
  int a = 0, b = 0;
};
template <int parts>
constexpr Term term_of(int index) {
  constexpr Term terms[] = {{1, 0}, {0, 1}, {0, 0}};
  return terms[parts == 2 ? index : 2];
}
template <int parts>
inline constexpr int terms = parts == 2 ? 3 : 1;

/// A CTA's shared memory.
template <ForwardConfig c>
struct Shared {
  static_assert(c.shared_bytes() <= 232448);  // the most a CTA can have on Hopper

  std::byte* first;

  __device__ std::byte* queries() const { return first; }  ///< parts x [rows, dim]
  __device__ std::byte* buffer(int index) const {          ///< parts x [keys, dim]
    return first + c.parts * c.query_part_bytes() + index * c.key_bytes();
  }
  __device__ int* exponents() const { return reinterpret_cast<int*>(buffer(c.buffers)); }
  __device__ Mbarrier* full() const { return reinterpret_cast<Mbarrier*>(exponents() + c.rows()); }
  __device__ Mbarrier* empty() const { return full() + c.buffers; }
  /// In shared memory, because there are no registers to spare.
  __device__ mma::QueryRows& rows() const {
    static_assert(sizeof(mma::QueryRows) <= c.rows_bytes);
    return *reinterpret_cast<mma::QueryRows*>(empty() + c.buffers);
  }
  /// Called by one thread, before a barrier of the whole CTA.
  __device__ void init_barriers() const {
    for (int n = 0; n < c.buffers; ++n) {
      init_barrier(full() + n, 1);
      init_barrier(empty() + n, 4 * c.consumers);
    }
    fence_barrier_inits();
  }
};

/// The K tiles that a CTA walks over.
template <ForwardConfig c>
struct Tiles {
  std::int64_t place;  ///< index of the sequence's first tile among all split tiles
  int first, end;

  __device__ Tiles(const AttentionCall& call, const mma::QueryRows& rows, const SplitRows& k)
      : place(k.first(call, rows.queries.b, rows.head_kv)) {
    const KeyRange range = rows.queries.any(call);
    first = static_cast<int>(range.first / c.keys);
    end = range.empty() ? first : static_cast<int>((range.last + c.keys - 1) / c.keys);
  }
};

/// The lane that loads K and V of each tile alternately.
template <ForwardConfig c>
__device__ void load_tiles(const Shared<c>& shared, const Tiles<c>& tiles, const SplitRows& k,
                           const SplitRows& v) {
  Ring<c.buffers> ring;
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
#pragma unroll
    for (int item = 0; item < 2; ++item) {
      wait(shared.empty() + ring.stage(), ring.parity() ^ 1);
      Mbarrier* full = shared.full() + ring.stage();
      arrive_expecting(full, c.key_bytes());
      copy_bytes(shared.buffer(ring.stage()), (item == 0 ? k : v).data + (tiles.place + tile) * c.key_bytes(),
                 c.key_bytes(), full);
      ring.advance();
    }
  }
}

/// A consumer warpgroup.
template <ForwardConfig c>
struct Consumer : QueryState<c> {
  using State = QueryState<c>;
  using State::call, State::rows, State::place, State::o;
  const Shared<c>& shared;
  const int index;
  TileDescriptor q_tile;
  Ring<c.buffers, 2> k_at{0}, v_at{1};  ///< the stages of the next K tile and the next V tile

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  __device__ Consumer(const AttentionCall& call_, const mma::QueryRows& rows_, const Shared<c>& shared_)
      : State(call_, rows_),
        shared(shared_),
        index(place.warp / 4),
        q_tile(describe_tile(address(shared.queries()) + index * 64 * 128, 0)) {}

  /// Splits the warpgroup's rows of Q. Returns whether this warp's rows fit.
  __device__ __forceinline__ bool load_queries() {
    const bool fit =
        State::template load_queries<PanelTile<c.dim, c.rows()>>(shared.queries(), shared.exponents());
    fence_async_proxy();  // wgmma reads Q by the async proxy
    sync_warpgroup();     // the other warps have stored their rows of Q
    return fit;
  }
  __device__ __forceinline__ void sync_warpgroup() const {
    if (index == 0) sync_some<1, 128>();
    if (index == 1) sync_some<2, 128>();
    if (index == 2) sync_some<3, 128>();
  }

  template <typename Place>
  __device__ __forceinline__ void wait_for(const Place& at) {
    wait(shared.full() + at.stage(), at.parity());
  }
  template <typename Place>
  __device__ __forceinline__ void release(Place& at) {
    if (place.lane == 0) arrive(shared.empty() + at.stage());
    at.advance();
  }
  /// Releases tiles that only other consumers see. It waits for them first, so that the arrival counts for
  /// their phase.
  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait_for(k_at);
      release(k_at);
      wait_for(v_at);
      release(v_at);
    }
  }

  /// S = Q·Kᵀ of the next tile. With two parts, a wgmma accumulator sums only 32 dims, and the accumulators
  /// are added in f32.
  __device__ __forceinline__ void compute_scores(mma::Scores<c>& s) {
    constexpr int steps = c.parts == 2 ? 2 : c.dim / 16;  // K steps of an accumulator
    constexpr int count = c.dim / 16 / steps;
    wait_for(k_at);
    const TileDescriptor k_tile = describe_tile(address(shared.buffer(k_at.stage())), 0);
    float sums[count][c.keys / 2];
#pragma unroll
    for (int p = 0; p < count; ++p) pin(sums[p]);
    fence_products();
#pragma unroll
    for (int p = 0; p < count; ++p) {
#pragma unroll
      for (int n = 0; n < terms<c.parts>; ++n) {
        constexpr auto term = term_of<c.parts>;
#pragma unroll
        for (int step = p * steps; step < (p + 1) * steps; ++step) {
          const int q_from = term(n).a * c.query_part_bytes() + step / 4 * (c.rows() * 128) + step % 4 * 32;
          const int k_from = term(n).b * c.key_part_bytes() + step / 4 * (c.keys * 128) + step % 4 * 32;
          WarpgroupProduct<__half, c.keys>::template from_shared<0, 0>(
              sums[p], q_tile + q_from / 16, k_tile + k_from / 16, n > 0 || step > p * steps);
        }
      }
    }
    commit_products();
    wait_products<0>();
#pragma unroll
    for (int p = 0; p < count; ++p) pin(sums[p]);
    release(k_at);
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) {
      float all = sums[0][n];
#pragma unroll
      for (int p = 1; p < count; ++p) all += sums[p][n];
      s[0][n / 4][n % 4] = all;
    }
  }

  /// Starts sum = P·V of the next tile, or sum += P·V where `add`.
  __device__ __forceinline__ void start_output(float (&sum)[c.dim / 2], const mma_f32::ScoreFragments<c>& p,
                                               bool add) {
    wait_for(v_at);
    const TileDescriptor v_tile = describe_tile(address(shared.buffer(v_at.stage())), c.keys * 128);
    pin(sum);
    fence_products();
#pragma unroll
    for (int n = 0; n < terms<c.parts>; ++n) {
      constexpr auto term = term_of<c.parts>;
#pragma unroll
      for (int step = 0; step < c.keys / 16; ++step) {
        const int v_from = term(n).b * c.key_part_bytes() + step * 16 * 128;
        WarpgroupProduct<__half, c.dim>::from_registers(sum, p[step][0][term(n).a], v_tile + v_from / 16,
                                                        add || n > 0 || step > 0);
      }
    }
    commit_products();
  }

  __device__ __forceinline__ void add_values(const mma_f32::ScoreFragments<c>& p, float factor) {
    auto& all = reinterpret_cast<float(&)[c.dim / 2]>(o.sum);
    if constexpr (c.parts == 1) {  // P includes the factor
      start_output(all, p, true);
      wait_products<0>();
      pin(all);
    } else {
      float sum[c.dim / 2];
      start_output(sum, p, false);
      wait_products<0>();
      pin(sum);
#pragma unroll
      for (int n = 0; n < c.dim / 2; ++n) all[n] = fmaf(sum[n], factor, all[n]);
    }
    release(v_at);
  }

  /// Keys that some row of the warpgroup sees.
  __device__ KeyRange seen() const {
    const QueryTile& queries = rows.queries;
    const int first = index * 64;
    const int last = min(first + 64, rows.count()) - 1;
    if (first > last) return {};
    return {call.keys_of(queries.sequence, queries.first + rows.query(first)).first,
            call.keys_of(queries.sequence, queries.first + rows.query(last)).last};
  }

  /// The loop over K tiles. Returns whether all tiles fit; if not, O must not be used.
  __device__ __forceinline__ bool walk(const Tiles<c>& tiles, const SplitRows& k, const SplitRows& v) {
    const KeyRange all = rows.queries.all(call), own = seen();
    const int first = own.empty() ? tiles.end : static_cast<int>(own.first / c.keys);
    const int end = own.empty() ? tiles.end : static_cast<int>((own.last + c.keys - 1) / c.keys);
    skip(first - tiles.first);
    // Each lane loads the exponents of one of 32 tiles: a load for each tile would expose its latency.
    int k_exponents = 0, v_exponents = 0;
    bool fit = true;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      if ((tile - first) % 32 == 0) {
        const int at = min(tile + place.lane, end - 1);
        k_exponents = k.exponents[tiles.place + at];
        v_exponents = v.exponents[tiles.place + at];
        fit &= k_exponents != mma_f32::unfit_tile && v_exponents != mma_f32::unfit_tile;
        const int least = min(__reduce_min_sync(~0u, v_exponents), o.exponent);
        if (v_exponents == mma_f32::zero_tile) v_exponents = least;
      }
      const int k_exponent = __shfl_sync(~0u, k_exponents, tile - first);
      const int v_exponent = __shfl_sync(~0u, v_exponents, tile - first);
      mma::Scores<c> s;
      compute_scores(s);
      const int first_key = tile * c.keys;
      if (first_key < all.first || first_key + c.keys > all.last) {
        const std::int64_t left = rows.queries.sequence.length_k - first_key;
        const KeyTile keys{first_key, static_cast<int>(min(static_cast<std::int64_t>(c.keys), left))};
        mma::hide<c>(call, rows, keys, place, s);
      }
      float scales_log2[1][2];
      this->find_scales_log2(scales_log2, k_exponent);
      this->raise_maxima(s, scales_log2);
      const float factor = o.rescale_for(v_exponent);
      mma_f32::ScoreFragments<c> p;
      fit &= c.parts == 2 || factor >= mma_f32::least_factor;
      this->exponentiate(p, s, scales_log2, factor);
      add_values(p, factor);
    }
    skip(tiles.end - end);
    return __all_sync(~0u, fit);
  }

  /// Offset of eight columns of one of eight rows of O, staged in the shared memory of the warp's Q. The
  /// exclusive or with the row's number avoids bank conflicts when lanes write pairs and read rows.
  static __device__ __forceinline__ unsigned staged(unsigned row, unsigned eight) {
    return eight / 8 * (c.rows() * 128) + row * 256 + ((eight % 8 * 32) ^ (row * 32));
  }

  /// Adds the sink, divides by the row sums, writes LSE and O. O is staged in shared memory, because a lane
  /// holds two columns of a row: a direct store of a warp would touch eight cache lines.
  __device__ __forceinline__ void finish() {
    constexpr int lanes = c.dim / 4;  // lanes per row
    const auto dims = static_cast<int>(call.problem.dim_v);
    const bool vectorized = mma_f32::aligned_fours(call.o) && dims % 4 == 0 && rows.heads == 1;
    const int column = 4 * (place.lane % lanes);
    const int first = place.first_row() + place.lane / lanes;
    const int present = column < dims ? rows.count() - first : 0;
    float* to = rows.float_of(call.o, first) + column;
    const auto powers = o.powers_back();
    const float factors[2] = {this->finish_row(0, 0) * powers.first, this->finish_row(0, 1) * powers.first};
    std::byte* smem = shared.queries() + place.first_row() * 128;
    const auto lane = static_cast<unsigned>(place.lane);
    sync_warpgroup();  // no product of the warpgroup reads Q any more, which O overwrites
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < c.dim / 8; ++n) {
        *reinterpret_cast<float2*>(smem + staged(lane / 4, n) + lane % 4 * 8) = {
            o.sum[0][n][2 * half] * factors[half] * powers.second,
            o.sum[0][n][2 * half + 1] * factors[half] * powers.second};
      }
      __syncwarp();  // all lanes have stored the eight rows
      if (vectorized) {
#pragma unroll
        for (int n = 0; n < 8; n += 32 / lanes) {
          const int row = 8 * half + n;
          const auto four = *reinterpret_cast<const float4*>(
              smem + staged(lane / lanes + n, lane % lanes / 2) + lane % 2 * 16);
          if (row < present) *reinterpret_cast<float4*>(to + row * call.o.stride_s) = four;
        }
      } else {
        write_by_elements(smem, 8 * half + place.lane / lanes, column, dims);
      }
      __syncwarp();  // all lanes have read them, and the next half overwrites them
    }
  }

  /// Writes the staged rows from `first` on, for any strides of O.
  __device__ __forceinline__ void write_by_elements(const std::byte* smem, int first, int column,
                                                    int dims) const {
    constexpr int lanes = c.dim / 4;
#pragma unroll 1
    for (int row = first; row < first / 8 * 8 + 8 && place.first_row() + row < rows.count();
         row += 32 / lanes) {
      const auto* from = reinterpret_cast<const float*>(smem + staged(row % 8, column / 8)) + column % 8;
      float* to = rows.float_of(call.o, place.first_row() + row) + column;
#pragma unroll 1
      for (int n = 0; n < 4 && column + n < dims; ++n) to[n] = from[n];
    }
  }
};

/// Compiled for sm_90a only.
template <typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    forward_kernel(const __grid_constant__ AttentionCall call, const mma::ForwardGrid blocks,
                   const SplitRows k, const SplitRows v, const Unfit unfit) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardConfig c = Table::rows[row];
  static_assert(c.keys == tile_keys);
  TILEWISE_DYNAMIC_SHARED(std::byte, first_smem, 1024);
  let_next_kernel_start();
  const mma::QueryRows rows = blocks.rows(call, blockIdx.x);
  if (rows.queries.count <= 0) return wait_for_previous_kernel();
  const Shared<c> shared{first_smem};
  if (threadIdx.x == 0) {
    shared.init_barriers();
    shared.rows() = rows;
  }
  const Tiles<c> tiles(call, rows, k);
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  __syncthreads();  // mbarriers and rows are initialised; the last barrier of the whole CTA

  if (warp >= 4 * c.consumers) {
    keep_registers<c.producer_registers()>();
    if (warp == 4 * c.consumers && elected()) {
      wait_for_previous_kernel();
      load_tiles<c>(shared, tiles, k, v);
    }
  } else {
    take_registers<c.consumer_registers()>();
    Consumer<c> consumer(call, shared.rows(), shared);
    const bool queries_fit = consumer.load_queries();
    wait_for_previous_kernel();  // the previous kernel splits only K and V, so Q was loaded before this wait
    const bool keys_fit = consumer.walk(tiles, k, v);
    if (!queries_fit || !keys_fit) {
      for (int n = consumer.place.lane; n < rows.heads; n += 32) {
        unfit.queries[rows.queries.b * call.problem.heads_q + rows.queries.h + n] = 1;
        *unfit.any = 1;
      }
    }
    consumer.finish();
  }
#endif
}

namespace {

/// The row of a table that a call runs with.
template <typename Table>
int row_of(const AttentionCall& call) {
  const int dim = std::max(call.problem.dim_qk, call.problem.dim_v) <= 64 ? 64 : 128;
  const auto able = [&](const ForwardConfig& c) { return c.dim == dim; };
  const ForwardConfig& usual = Table::rows[first_row<Table>(able)];
  const auto cost = [&](int row) {
    const ForwardConfig& c = Table::rows[row];
    if (c.use == Use::any) return 1;
    if (c.use == Use::few_keys) return call.problem.most_keys <= 4 * c.keys ? 0 : 2;
    const int multiprocessors = device_properties(call.problem.device.index).multiprocessors;
    const std::int64_t room = std::int64_t{usual.blocks} * multiprocessors;
    const bool few = mma::ForwardGrid::of(call, usual.rows(), multiprocessors).count() <= room;
    return Turns::uneven(call) && few ? 0 : 2;
  };
  return choose_row_of<Table>(call, able, cost);
}

template <typename Table>
mma_f32::ForwardSpace space_in(const AttentionCall& call, int row, void* base) {
  const ForwardConfig& c = Table::rows[row];
  return {call, base, tile_keys, c.parts, c.dim};
}
mma_f32::ForwardSpace space_of(const AttentionCall& call, int row, void* base) {
  return (call.allow_tf32 ? space_in<Tf32Forward> : space_in<FullForward>)(call, row, base);
}

template <typename Table, int row>
void run_row(const AttentionCall& call, const mma_f32::ForwardSpace& space, const Context& context) {
  constexpr ForwardConfig c = Table::rows[row];
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto dim_qk = static_cast<int>(call.problem.dim_qk);
  const auto dim_v = static_cast<int>(call.problem.dim_v);
  mma_f32::split<c.dim, c.keys, c.parts, PanelTile<c.dim, c.keys>>(
      call, {.count = 2, .tensors = {{call.k, dim_qk, space.k}, {call.v, dim_v, space.v}}}, stream,
      mma_f32::ClearMarks{.unfit = space.unfit});
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto blocks = mma::ForwardGrid::of(call, c.rows(), multiprocessors);
  launch<forward_kernel<Table, row>>({.name = "tilewise wgmma f32 forward",
                                      .blocks = blocks.count(),
                                      .threads = c.threads(),
                                      .shared_bytes = c.shared_bytes(),
                                      .stream = stream,
                                      .early = true},
                                     call, blocks, space.k, space.v, space.unfit);
}

}  // namespace

Configuration configure_forward(const AttentionCall& call) {
  const int row = call.allow_tf32 ? row_of<Tf32Forward>(call) : row_of<FullForward>(call);
  return {.workspace_bytes = space_of(call, row, nullptr).bytes, .row = row};
}

void forward(const AttentionCall& call, int chosen, const Context& context) {
  const mma_f32::ForwardSpace space = space_of(call, chosen, context.workspace.data);
  const auto run = [&]<typename Table>() {
    with_row<Table>(chosen, [&](auto row) { run_row<Table, row>(call, space, context); });
  };
  call.allow_tf32 ? run.template operator()<Tf32Forward>() : run.template operator()<FullForward>();
  simt::fused_forward_of(
      call, {.queries = space.unfit.queries, .keys = space.unfit.keys, .any = space.unfit.any}, context);
}

}  // namespace tilewise::cuda::wgmma_f32
