#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/common/key_tiles.cuh"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/fused_short.h"
#include "cuda/attention/simt/forward/softmax.cuh"
#include "cuda/attention/simt/forward/tile.cuh"
#include "cuda/attention/simt/fused.h"
#include "cuda/attention/simt/multiply.cuh"
#include "cuda/attention/simt/shared_tile.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {

// The steps before and after the softmax: score rules, masks and dropout, and the way of a warp's S and P
// through shared memory.

/// Index of query r and key c in a warp's S or P in shared memory, [keys, warp_queries].
template <typename C>
__device__ __forceinline__ int pair_index(int r, int c) {
  return c * C::p_stride + r;
}

template <typename C>
__device__ __forceinline__ void store_accumulator(const float (&s)[C::M][C::N], float* p_smem,
                                                  const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      *reinterpret_cast<float4*>(p_smem + pair_index<C>(in_runs<C::R>(place.lane.row, m), place.key(n))) =
          float4{s[m][n], s[m + 1][n], s[m + 2][n], s[m + 3][n]};
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_accumulator(float (&s)[C::M][C::N], const float* p_smem,
                                                 const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      const float4 four = load_four(p_smem + pair_index<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
#pragma unroll
      for (int r = 0; r < 4; ++r) s[m + r][n] = element(four, r);
    }
  }
}

/// The view of a lane's S (accumulator.cuh): its keys have a distance of C::C.
template <typename C>
struct SimtView {
  static constexpr int queries = C::M;
  static constexpr int keys = C::N;
  static __device__ __forceinline__ float& at(float (&s)[C::M][C::N], int q, int k) { return s[q][k]; }
  static __device__ __forceinline__ constexpr int step(int k) { return C::C * k; }
};

/// Hides the keys outside the band. In the plain kernel this is the only step between a product and exp2.
template <typename C>
__device__ __forceinline__ void hide(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const ForwardPlace<C>& place, float (&s)[C::M][C::N]) {
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const KeyRange range = call.keys_of(query.sequence, query.first + place.query(m));
    const int first = static_cast<int>(range.first - keys.first) - place.lane.column;
    const int last = static_cast<int>(range.last - keys.first) - place.lane.column;
    hide_outside<SimtView<C>>(s, m, first, last);
  }
}

/// Replaces products q·k by scores. The accumulator goes through shared memory, where a loop can index its
/// elements, so that the long code for one element is instantiated once.
template <typename C>
__device__ __forceinline__ void finish_scores(const AttentionCall& call, const ScoreRule& rules,
                                              const QueryTile& query, const KeyTile& keys, bool edge,
                                              const ForwardPlace<C>& place, float* p_smem,
                                              float (&s)[C::M][C::N]) {
  store_accumulator<C>(s, p_smem, place);
#pragma unroll 1
  for (int index = 0; index < C::N * C::M / 4; ++index) {  // a lane reads only what it stored itself
    const int n = index / (C::M / 4);
    const int m = index % (C::M / 4) * 4;
    const std::int64_t j = keys.first + place.key(n);
    float4& four =
        *reinterpret_cast<float4*>(p_smem + pair_index<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
    float lane[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::int64_t i = query.first + min(place.query(m + r), query.count - 1);
      float tangent;
      lane[r] = edge && hidden(call, query.sequence, keys, i, j)
                    ? minus_infinity
                    : score_of<true>(call, rules, query.sequence, query.b, query.h, i, j, lane[r], tangent);
    }
    four = {lane[0], lane[1], lane[2], lane[3]};
  }
  load_accumulator<C>(s, p_smem, place);
}

/// Applies dropout to P in shared memory. A lane draws for four keys of a query at once, which share a Philox
/// counter.
template <typename C>
__device__ __forceinline__ void drop(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const ForwardPlace<C>& place, float* p_smem) {
  __syncwarp();  // the warp's P is stored, and other lanes read it
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % 32; index < C::warp_queries * C::group_keys / 4;
       index += 32) {
    const int r = index % C::warp_queries;
    const int c = index / C::warp_queries * 4;
    const std::int64_t i = query.first + place.first_query() + r;
    const std::int64_t j = keys.first + c;
    if (DropoutFactors::share_counters(call, keys.first)) {
      const DropoutFactors drawn(call, query.b, query.h, i, j);
#pragma unroll
      for (int n = 0; n < 4; ++n) p_smem[pair_index<C>(r, c + n)] *= drawn.factor[n];
    } else {
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        p_smem[pair_index<C>(r, c + n)] *= dropout_factor<true>(call, query.b, query.h, i, j + n);
      }
    }
  }
}

namespace {

// Attention in one kernel with an online softmax. A CTA keeps a tile of queries and walks over tiles of keys.
// S stays in registers, passes through shared memory once as P, and never reaches global memory. No two warps
// of a group share a query, so P needs no barrier of the CTA. Two barriers remain per tile of keys, and
// behind each the next copy is in flight. If D exceeds a tile's dims, the CTA walks over pieces of D for
// every tile of keys; each piece of Dv has a CTA of its own.
//
// Each kernel has two variants: plain, for aligned f32 rows with constant strides where only the band hides
// keys, and general, for everything else. A single kernel would cost the plain case a tenth of its speed, in
// registers.

// Element n of an array in registers, which cannot be indexed at run time.
template <int count>
__device__ __forceinline__ float pick(const float (&x)[count], int n) {
  if constexpr (count == 1) {
    return x[0];
  } else {
    float half[count / 2];
#pragma unroll
    for (int k = 0; k < count / 2; ++k) half[k] = n % 2 == 0 ? x[2 * k] : x[2 * k + 1];
    return pick(half, n / 2);
  }
}

// The epilogue: joins the sink, divides by the row sum and writes O. CTAs of the first piece of Dv also write
// LSE. Each lane does the arithmetic of one row, which keeps the code short: code that runs once mostly waits
// for its instructions.
template <typename C, bool general>
__device__ __forceinline__ void finish(const AttentionCall& call, const QueryTile& query, int first_dim,
                                       const ScoreRule& rules, float sign, const ForwardPlace<C>& place,
                                       float (&o)[C::M][C::V], SoftmaxRow<C>& row) {
  static_assert(C::M <= C::C);
#pragma unroll
  for (int m = 0; m < C::M; ++m) row.sum[m] = sum_over<C::C, C::Lanes::apart>(row.sum[m]);
  const int own = place.lane.column % C::M;
  const int r = place.query(own);
  float sum = pick(row.sum, own);
  float maximum = pick(row.maximum, own);
  float factor = 1;
  if constexpr (!general)
    maximum = fmaxf(maximum * rules.scale * sign, lowest);  // in natural units from here on
  if (call.problem.features.sinks) {
    float sink_weight;
    factor = join_sink(static_cast<float>(call.sinks.at(query.b, query.h)), maximum, sink_weight);
    sum = sum * factor + sink_weight;
  }
  const float own_inverse = sum == 0 ? 0.0f : factor / sum;
  const std::int64_t first = query.sequence.first_q + query.first;
  if (call.lse.wanted && first_dim == 0 && place.lane.column < C::M && r < query.count) {
    if constexpr (general) {  // maximum and logarithm may cancel, and a piece may ask for LSE in f64
      const double lse = sum == 0 ? static_cast<double>(minus_infinity)
                                  : static_cast<double>(maximum) + log(static_cast<double>(sum));
      std::byte* to = call.lse.at(query.b, query.h, first + r);
      if (call.lse.dtype == DType::f64) {
        *reinterpret_cast<double*>(to) = lse;
      } else {
        *reinterpret_cast<float*>(to) = static_cast<float>(lse);
      }
    } else {  // kept short, too
      const float logarithm = maximum + logf(sum);
      const float lse = sum == 0 ? minus_infinity : logarithm;
      *reinterpret_cast<float*>(call.lse.at(query.b, query.h, first + r)) = lse;
    }
  }
  const int dims = static_cast<int>(call.problem.dim_v) - first_dim;
  const bool aligned = general && aligned_rows(call.o, call.problem.dim_v);
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const float inverse = __shfl_sync(~0u, own_inverse, place.lane.in_row(m));
    if (place.query(m) >= query.count) continue;
    std::byte* out = call.o.at(query.b, query.h, first + place.query(m)) + first_dim * size_of(call.o.dtype);
#pragma unroll
    for (int d = 0; d < C::V; d += 4) {
      const float4 four{o[m][d] * inverse, o[m][d + 1] * inverse, o[m][d + 2] * inverse,
                        o[m][d + 3] * inverse};
      if constexpr (general) {
        store_chunk(out, call.o.dtype, place.dim(d), dims, aligned, four);
      } else if (place.dim(d) < dims) {
        store_4(reinterpret_cast<float*>(out) + place.dim(d), four);
      }
    }
  }
}

struct Blocks {
  QueryGrid queries;
  int dim_pieces;  // pieces of Dv
};

// Loads the tile of Q and tiles of K and V into shared memory.
template <typename C, bool general>
struct Loader {
  const QueryTile& query;
  RowAddress q;
  std::conditional_t<general, PagedRowAddress, RowAddress> k, v;
  int dim_qk, first_dim, dims_v;  // the CTA's piece of Dv is [first_dim, first_dim + dims_v)

  __device__ Loader(const AttentionCall& call, const QueryTile& query_, int first_dim_)
      : query(query_),
        q(call.q, call.problem.dim_qk, query.b, query.h, query.sequence.first_q),
        k(key_rows(call, query, call.k, call.problem.dim_qk)),
        v(key_rows(call, query, call.v, call.problem.dim_v)),
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        first_dim(first_dim_),
        dims_v(min(C::dim, static_cast<int>(call.problem.dim_v) - first_dim)) {}

  __device__ int pieces() const { return general && takes_pieces<C> ? (dim_qk + C::dim - 1) / C::dim : 1; }
  __device__ int dims(int piece) const { return min(C::dim, dim_qk - piece * C::dim); }
  __device__ int depth(int piece) const { return (dims(piece) + 7) / 8 * 8; }

  __device__ void queries(int piece, float* to) const {
    load_rows<general, C::queries, C::dim, C::row_stride, C::threads>(to, q, query.first, query.count,
                                                                      piece * C::dim, dims(piece));
  }
  __device__ void keys(const KeyTile& tile, int piece, float* to) const {
    load_rows<general, C::keys, C::dim, C::row_stride, C::threads>(to, k, tile.first, tile.count,
                                                                   piece * C::dim, dims(piece));
  }
  __device__ void values(const KeyTile& tile, float* to) const {
    load_rows<general, C::keys, C::dim, C::dim, C::threads>(to, v, tile.first, tile.count, first_dim, dims_v);
  }

 private:
  __device__ static auto key_rows(const AttentionCall& call, const QueryTile& query, const Rows& rows,
                                  std::int64_t dim) {
    const std::int64_t h = call.key_head(query.h);
    if constexpr (general) {
      return PagedRowAddress(call, rows, dim, query.b, h, query.sequence.first_k);
    } else {
      return RowAddress(rows, dim, query.b, h, query.sequence.first_k);
    }
  }
};

// Computes the query tile and the piece of Dv with that index.
template <typename C, bool general>
__device__ __forceinline__ void attend(const AttentionCall& call, const Blocks& blocks,
                                       const SomeHeads& heads, std::int64_t index, float* shared) {
  float* q_smem = shared;                // [piece of D, queries], transposed
  float* k_smem = q_smem + C::q_floats;  // [keys, piece of D]
  float* v_smem = k_smem + C::k_floats;  // [keys, piece of Dv]
  float* p_smem = v_smem + C::v_floats;  // per warp [group_keys, warp_queries]
  float* q_loaded = v_smem;              // [queries, piece of D], until V and P need the place

  const int first_dim = static_cast<int>(index % static_cast<std::uint32_t>(blocks.dim_pieces)) * C::dim;
  const Turn turn = Turns::of(call, call.problem.batch * call.problem.heads_q, blocks.queries.tiles)
                        .turn(index / static_cast<std::uint32_t>(blocks.dim_pieces));
  const auto [b, h] = turn.among(call.problem.heads_q);
  if (!heads.has(call, b, h)) return;
  // The last queries first: with causal they see the most keys.
  const QueryTile query = blocks.queries.tile(call, b, h, blocks.queries.tiles - 1 - turn.tile);
  if (query.count <= 0) return;

  const ForwardPlace<C> place;
  const ScoreRule rules = general ? ScoreRule(call, b, h) : ScoreRule(call);
  const Loader<C, general> load(call, query, first_dim);
  const int pieces = load.pieces();
  const KeyRange all = query.all(call);
  float* p_warp = p_smem + place.warp * C::group_keys * C::p_stride;
  const Transposed<C::queries, C::R> q_transposed{q_smem + place.first_query() + place.lane.row * 4};
  const ByRows<C::row_stride, C::C> k_rows{k_smem +
                                           (place.group * C::group_keys + place.lane.column) * C::row_stride};
  const Transposed<C::p_stride, C::R> p_transposed{p_warp + place.lane.row * 4};
  const Transposed<C::dim, C::C> v_rows{v_smem + place.group * C::group_keys * C::dim +
                                        place.lane.column * 4};
  // The largest product is the largest score only if the scale is positive. So Q takes the scale's sign.
  const float sign = !general && rules.scale < 0 ? -1.0f : 1.0f;
  const float unit = general ? log2e : rules.scale_log2 * sign;
  const float slack = 8 / unit;

  float o[C::M][C::V] = {};
  SoftmaxRow<C> row;
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    row.maximum[m] = lowest;
    row.sum[m] = 0;
  }

  const auto multiply = [&](float(&sum)[C::M][C::N], int depth) {
    if constexpr (general && sums_in_runs<C>) {
      multiply_in_runs(sum, q_transposed, k_rows, depth,
                       [](auto& part, const auto& a, const auto& b, int run) {
                         multiply_transposed_rows(part, a, b, run);
                       });
    } else {
      multiply_transposed_rows(sum, q_transposed, k_rows, depth);
    }
  };

  KeyTiles<general> tiles(call, query, C::keys);
  KeyTile keys = tiles.next();
  if (keys.count > 0 && pieces == 1) {
    load.queries(0, q_loaded);
    commit_copies();
    load.keys(keys, 0, k_smem);
    commit_copies();
    wait_copies<1>();
    __syncthreads();  // all threads' copies of Q have arrived
    transpose_rows<C::queries, C::row_stride, C::threads>(q_smem, q_loaded, load.depth(0), sign);
  }
  while (keys.count > 0) {
    const KeyTile ahead = tiles.next();
    float s[C::M][C::N] = {};
    if (pieces == 1) {
      wait_copies<0>();
      __syncthreads();  // K has arrived, Q is transposed, and all warps have read the last V, now overwritten
      load.values(keys, v_smem);
      commit_copies();
      multiply(s, load.depth(0));
      wait_copies<0>();
      __syncthreads();  // V has arrived, and all warps have read K, which the next copy overwrites
      if (ahead.count > 0) load.keys(ahead, 0, k_smem);
      commit_copies();
    } else {
      for (int piece = 0; piece < pieces; ++piece) {
        __syncthreads();  // all warps have read the tiles that the loads overwrite
        load.queries(piece, q_loaded);
        load.keys(keys, piece, k_smem);
        commit_copies();
        wait_copies<0>();
        __syncthreads();  // all threads' copies of the piece have arrived
        transpose_rows<C::queries, C::row_stride, C::threads>(q_smem, q_loaded, load.depth(piece), sign);
        __syncthreads();  // Q is transposed
        float piece_s[C::M][C::N] = {};
        multiply(piece_s, load.depth(piece));
        if (piece > 0) load_accumulator<C>(s, p_warp, place);
#pragma unroll
        for (int m = 0; m < C::M; ++m) {
#pragma unroll
          for (int n = 0; n < C::N; ++n) s[m][n] += piece_s[m][n];
        }
        store_accumulator<C>(s, p_warp, place);  // S of the pieces so far is kept in the place of P
      }
      load.values(keys, v_smem);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // all threads' copies of V have arrived
    }
    const KeyTile own = place.share(keys);
    const bool edge = own.first < all.first || own.first + C::group_keys > all.last ||
                      own.count < C::group_keys || own.tile >= 0;
    if constexpr (general) {
      finish_scores<C>(call, rules, query, own, edge, place, p_warp, s);
    } else {
      if (edge) hide<C>(call, query, own, place, s);
    }
    softmax<C, general>(s, o, unit, slack, row);
    store_accumulator<C>(s, p_warp, place);
    if constexpr (general) {
      if (call.problem.features.dropout) drop<C>(call, query, own, place, p_warp);
    }
    __syncwarp();  // the warp's P is stored, and other lanes read it
    add_product(o, p_transposed, v_rows, (own.count + 7) / 8 * 8);
    keys = ahead;
  }
  if constexpr (C::groups == 2) {
    join_groups<C, general>(o, unit, row, place.group, k_smem);
    if (place.group == 1) return;
  }
  finish<C, general>(call, query, first_dim, rules, sign, place, o, row);
}

template <typename C, bool general>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_forward(const __grid_constant__ AttentionCall call, const Blocks blocks) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  if constexpr (runs_in_code(C::shared_bytes)) attend<C, general>(call, blocks, {}, blockIdx.x, shared);
}

// For selected heads, often none. One CTA per SM looks for selected tiles.
template <typename C, bool general>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_forward_of_some(const __grid_constant__ AttentionCall call, const Blocks blocks,
                          const SomeHeads heads, std::uint32_t count) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  wait_for_previous_kernel();
  if (heads.none()) return;
  for (std::uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    attend<C, general>(call, blocks, heads, index, shared);
    __syncthreads();  // all warps have read shared memory, which the next tile overwrites
  }
}

template <typename C>
Blocks blocks_of(const AttentionCall& call) {
  return {QueryGrid::of(call, C::queries), static_cast<int>((call.problem.dim_v + C::dim - 1) / C::dim)};
}
std::int64_t count_of(const AttentionCall& call, const Blocks& blocks) {
  return call.problem.batch * call.problem.heads_q * blocks.queries.tiles * blocks.dim_pieces;
}

template <typename C, bool general>
void run(const AttentionCall& call, cudaStream_t stream) {
  const Blocks blocks = blocks_of<C>(call);
  launch<fused_forward<C, general>>({.name = "tilewise fused forward",
                                     .blocks = count_of(call, blocks),
                                     .threads = C::threads,
                                     .shared_bytes = C::shared_bytes,
                                     .stream = stream},
                                    call, blocks);
}

template <typename C, bool general>
void run_some(const AttentionCall& call, const SomeHeads& heads, const Context& context) {
  const Blocks blocks = blocks_of<C>(call);
  const std::int64_t count = count_of(call, blocks);
  launch<fused_forward_of_some<C, general>>(
      {.name = "tilewise fused forward, some heads",
       .blocks = std::min<std::int64_t>(count, device_properties(context.device.index).multiprocessors),
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = static_cast<cudaStream_t>(context.stream),
       .early = has_pdl(context.device)},
      call, blocks, heads, static_cast<std::uint32_t>(count));
}

// `asked` is the call whose lengths count (choosing_by()).
template <bool general>
void run_for(const AttentionCall& call, const AttentionCall& asked, const Context& context) {
  const AttentionProblem& problem = asked.problem;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const DeviceProperties& device = device_properties(context.device.index);
  // A smaller tile has a lower throughput, so it pays only where most SMs would be idle with a larger one.
  const auto suits = [&]<typename C>(C) {
    const std::int64_t blocks = problem.batch * problem.heads_q * QueryGrid::of(asked, C::queries).tiles;
    return C::shared_bytes <= device.shared_bytes && 4 * blocks >= 3 * device.multiprocessors;
  };
  if (problem.dim_qk <= 64 && problem.dim_v <= 64) {
    if (suits(Wide64{})) return run<Wide64, general>(call, stream);
    return suits(Half64{}) ? run<Half64, general>(call, stream) : run<Small64, general>(call, stream);
  }
  static_assert(takes_pieces<Small64> && takes_pieces<Small128>);
  if constexpr (!general) {
    // Longer tiles of keys have fewer barriers and softmax steps, but a last tile that is less full.
    if (problem.length_k >= 16 * Wide128::keys && suits(Long128{}))
      return run<Long128, general>(call, stream);
  }
  // A model of the time until the last CTA ends: waves of equal CTAs. Where causal makes CTAs unequal and the
  // longest start first, the SMs have equal work, but no less than the longest CTA.
  const auto duration = [&]<typename C>(C, double speed) {
    const std::int64_t pieces = (problem.dim_v + C::dim - 1) / C::dim;
    const double blocks = static_cast<double>(problem.batch * problem.heads_q * pieces *
                                              QueryGrid::of(asked, C::queries).tiles);
    const double each = blocks / device.multiprocessors;
    return (Turns::uneven(asked) ? std::max(1.0, each / 2) : std::ceil(each)) * C::queries / speed;
  };
  if (problem.dim_qk <= Wide128::dim && Wide128::shared_bytes <= device.shared_bytes) {
    const double wide = duration(Wide128{}, 1);
    const double half = duration(Half128{}, 0.85);
    const double small = duration(Small128{}, 0.65);
    if constexpr (!general) {
      if (takes_short(asked, context) && duration(ShortTile{}, 0.98) <= std::min({wide, half, small}))
        return short_forward(call, context);
    }
    if (wide <= std::min(half, small)) return run<Wide128, general>(call, stream);
    if (half <= small && Half128::shared_bytes <= device.shared_bytes)
      return run<Half128, general>(call, stream);
  }
  if (problem.dim_qk <= Lean128::dim && Half128::shared_bytes > device.shared_bytes && suits(Lean128{}))
    return run<Lean128, general>(call, stream);
  return Small128::shared_bytes <= device.shared_bytes ? run<Small128, general>(call, stream)
                                                       : run<Small64, general>(call, stream);
}

// Whether the plain variant takes the call: only the band hides keys, and rows are aligned f32 that fit whole
// into the GPU's shared memory.
bool plain_forward(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const std::size_t shared_bytes = device_properties(problem.device.index).shared_bytes;
  const int most = Small128::shared_bytes <= shared_bytes ? Small128::dim : Small64::dim;
  return problem.length_q > 1 && !problem.features.needs_more_than_band() &&
         problem.layout != Layout::paged && !problem.piece.wide_statistics &&
         call.scale != 0 &&  // times 0, a hidden product, −inf, would be NaN
         plain_rows(call.q, problem.dim_qk) && plain_rows(call.k, problem.dim_qk) &&
         plain_rows(call.v, problem.dim_v) && plain_rows(call.o, problem.dim_v) && problem.dim_qk <= most &&
         problem.dim_v <= most;
}

}  // namespace

void fused_forward(const AttentionCall& call, const Context& context) {
  clear_unused_outputs(call, static_cast<cudaStream_t>(context.stream));
  choosing_by(call, [&](const AttentionCall& asked) {
    plain_forward(asked) ? run_for<false>(call, asked, context) : run_for<true>(call, asked, context);
  });
}

void fused_forward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context) {
  clear_unused_outputs(call, static_cast<cudaStream_t>(context.stream));
  if (!plain_forward(call)) return run_some<Small64, true>(call, heads, context);
  const bool narrow = call.problem.dim_qk <= Half64::dim && call.problem.dim_v <= Half64::dim;
  narrow ? run_some<Half64, false>(call, heads, context) : run_some<Small128, false>(call, heads, context);
}

}  // namespace tilewise::cuda::simt
