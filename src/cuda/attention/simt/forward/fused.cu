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

// What becomes of a warp's products before and after the softmax: masks, and the way through shared memory.

/// Where query r and key c of a warp are in its weights, [keys, warp_queries].
template <typename C>
__device__ __forceinline__ int weight_at(int r, int c) {
  return c * C::p_stride + r;
}

template <typename C>
__device__ __forceinline__ void store_weights(const float (&p)[C::M][C::N], float* p_smem,
                                              const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      *reinterpret_cast<float4*>(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n))) =
          float4{p[m][n], p[m + 1][n], p[m + 2][n], p[m + 3][n]};
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_weights(float (&s)[C::M][C::N], const float* p_smem,
                                             const ForwardPlace<C>& place) {
#pragma unroll
  for (int n = 0; n < C::N; ++n) {
#pragma unroll
    for (int m = 0; m < C::M; m += 4) {
      const float4 four = load_four(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
#pragma unroll
      for (int r = 0; r < 4; ++r) s[m + r][n] = element(four, r);
    }
  }
}

/// A lane's S (accumulator.cuh): its keys are C::C apart.
template <typename C>
struct SimtView {
  static constexpr int queries = C::M;
  static constexpr int keys = C::N;
  static __device__ __forceinline__ float& at(float (&s)[C::M][C::N], int q, int k) { return s[q][k]; }
  static __device__ __forceinline__ constexpr int step(int k) { return C::C * k; }
};

/// Hides what the band hides: in the plain kernel all there is between a product and exp2.
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

/// Products to scores by way of shared memory, where a loop can reach them: the code for a pair, with all it
/// may have to do, is there once.
template <typename C>
__device__ __forceinline__ void finish_scores(const AttentionCall& call, const ScoreRule& rules,
                                              const QueryTile& query, const KeyTile& keys, bool edge,
                                              const ForwardPlace<C>& place, float* p_smem,
                                              float (&s)[C::M][C::N]) {
  store_weights<C>(s, p_smem, place);
#pragma unroll 1
  for (int index = 0; index < C::N * C::M / 4; ++index) {  // a lane meets what it stored itself
    const int n = index / (C::M / 4);
    const int m = index % (C::M / 4) * 4;
    const std::int64_t j = keys.first + place.key(n);
    float4& four =
        *reinterpret_cast<float4*>(p_smem + weight_at<C>(in_runs<C::R>(place.lane.row, m), place.key(n)));
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
  load_weights<C>(s, p_smem, place);
}

/// A lane draws for four keys of a query at a time, which share a random number.
template <typename C>
__device__ __forceinline__ void drop(const AttentionCall& call, const QueryTile& query, const KeyTile& keys,
                                     const ForwardPlace<C>& place, float* p_smem) {
  __syncwarp();  // the warp's weights are there
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
      for (int n = 0; n < 4; ++n) p_smem[weight_at<C>(r, c + n)] *= drawn.factor[n];
    } else {
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        p_smem[weight_at<C>(r, c + n)] *= dropout_factor<true>(call, query.b, query.h, i, j + n);
      }
    }
  }
}

namespace {

// Online softmax in one kernel. A block keeps a tile of queries and walks over tiles of keys; scores live in
// registers, pass through shared memory once as weights, and never reach global memory. A warp has its
// queries for itself, so that weights need no barrier: two a tile of keys are left, each with the next copy
// under way behind it. Head dims beyond a tile's are met by walking over pieces of D for every tile of keys,
// and by giving each piece of Dv a block of its own.

// There are two of each: a plain kernel for aligned f32 rows at a stride and scores that only a band hides,
// and a general one for everything else. One kernel for all would cost the plain case a tenth of its speed,
// in registers.

// Element n of a few in registers, which cannot be reached by an index.
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

// Joins the sink, divides, writes o (and lse, by the blocks of the first piece of Dv). Each lane does the
// arithmetic of one row: code that runs once is mostly waited for, so it is kept short.
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
    maximum = fmaxf(maximum * rules.scale * sign, lowest);  // natural units from here on
  if (call.problem.features.sinks) {
    float sink_weight;
    factor = join_sink(static_cast<float>(call.sinks.at(query.b, query.h)), maximum, sink_weight);
    sum = sum * factor + sink_weight;
  }
  const float own_inverse = sum == 0 ? 0.0f : factor / sum;
  const std::int64_t first = query.sequence.first_q + query.first;
  if (call.lse.wanted && first_dim == 0 && place.lane.column < C::M && r < query.count) {
    if constexpr (general) {  // maximum and logarithm may cancel, and a piece may ask for lse in f64
      const double lse = sum == 0 ? static_cast<double>(minus_infinity)
                                  : static_cast<double>(maximum) + log(static_cast<double>(sum));
      std::byte* to = call.lse.at(query.b, query.h, first + r);
      if (call.lse.dtype == DType::f64) {
        *reinterpret_cast<double*>(to) = lse;
      } else {
        *reinterpret_cast<float*>(to) = static_cast<float>(lse);
      }
    } else {  // short code
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
  int dim_pieces;  // of Dv
};

// How rows come into shared memory: queries, and the keys and values of a tile.
template <typename C, bool general>
struct Loader {
  const QueryTile& query;
  RowAddress q;
  std::conditional_t<general, PagedRowAddress, RowAddress> k, v;
  int dim_qk, first_dim, dims_v;  // of v: the block's piece

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

// What the block of that index does.
template <typename C, bool general>
__device__ __forceinline__ void attend(const AttentionCall& call, const Blocks& blocks,
                                       const SomeHeads& heads, std::int64_t index, float* shared) {
  float* q_smem = shared;                // [D piece, queries], transposed
  float* k_smem = q_smem + C::q_floats;  // [keys, D piece]
  float* v_smem = k_smem + C::k_floats;  // [keys, Dv piece]
  float* p_smem = v_smem + C::v_floats;  // a warp: [group_keys, warp_queries]
  float* q_loaded = v_smem;              // [queries, D piece], before values and weights need the place

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
  const Transposed<C::p_stride, C::R> weights{p_warp + place.lane.row * 4};
  const Transposed<C::dim, C::C> values{v_smem + place.group * C::group_keys * C::dim +
                                        place.lane.column * 4};
  // The maximum of products is that of scores only where the scale is positive, so its sign goes to the
  // queries.
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
    __syncthreads();  // queries are there
    transpose_rows<C::queries, C::row_stride, C::threads>(q_smem, q_loaded, load.depth(0), sign);
  }
  while (keys.count > 0) {
    const KeyTile ahead = tiles.next();
    float s[C::M][C::N] = {};
    if (pieces == 1) {
      wait_copies<0>();
      __syncthreads();  // keys are there, queries are transposed, and everyone is done with the last values
      load.values(keys, v_smem);
      commit_copies();
      multiply(s, load.depth(0));
      wait_copies<0>();
      __syncthreads();  // values are there, and everyone is done with the keys
      if (ahead.count > 0) load.keys(ahead, 0, k_smem);
      commit_copies();
    } else {
      for (int piece = 0; piece < pieces; ++piece) {
        __syncthreads();  // everyone is done with what is overwritten
        load.queries(piece, q_loaded);
        load.keys(keys, piece, k_smem);
        commit_copies();
        wait_copies<0>();
        __syncthreads();  // the piece is there
        transpose_rows<C::queries, C::row_stride, C::threads>(q_smem, q_loaded, load.depth(piece), sign);
        __syncthreads();  // and transposed
        float part[C::M][C::N] = {};
        multiply(part, load.depth(piece));
        if (piece > 0) load_weights<C>(s, p_warp, place);
#pragma unroll
        for (int m = 0; m < C::M; ++m) {
#pragma unroll
          for (int n = 0; n < C::N; ++n) s[m][n] += part[m][n];
        }
        store_weights<C>(s, p_warp, place);  // the sum waits where weights will be
      }
      load.values(keys, v_smem);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // values are there
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
    store_weights<C>(s, p_warp, place);
    if constexpr (general) {
      if (call.problem.features.dropout) drop<C>(call, query, own, place, p_warp);
    }
    __syncwarp();  // the warp's weights are there
    add_product(o, weights, values, (own.count + 7) / 8 * 8);
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

// For some heads, which are often none: as many blocks as there are multiprocessors look for something to do.
template <typename C, bool general>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_forward_of_some(const __grid_constant__ AttentionCall call, const Blocks blocks,
                          const SomeHeads heads, std::uint32_t count) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  wait_for_kernel_ahead();
  if (heads.none()) return;
  for (std::uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    attend<C, general>(call, blocks, heads, index, shared);
    __syncthreads();  // everyone is done with shared memory
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
       .early = begins_early(context.device)},
      call, blocks, heads, static_cast<std::uint32_t>(count));
}

template <bool general>
void run_for(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const DeviceProperties& device = device_properties(context.device.index);
  // A smaller tile does less work a second, so it pays only where most of the GPU would stand idle.
  const auto suits = [&]<typename C>(C) {
    const std::int64_t blocks = problem.batch * problem.heads_q * QueryGrid::of(call, C::queries).tiles;
    return C::shared_bytes <= device.shared_bytes && 4 * blocks >= 3 * device.multiprocessors;
  };
  if (problem.dim_qk <= 64 && problem.dim_v <= 64) {
    if (suits(Wide64{})) return run<Wide64, general>(call, stream);
    return suits(Half64{}) ? run<Half64, general>(call, stream) : run<Small64, general>(call, stream);
  }
  static_assert(takes_pieces<Small64> && takes_pieces<Small128>);
  if constexpr (!general) {
    // Longer tiles of keys have fewer ends, at the price of a last one that is filled less.
    if (problem.length_k >= 16 * Wide128::keys && suits(Long128{}))
      return run<Long128, general>(call, stream);
  }
  // How long until the last block is done: a round of blocks after another, or, where causal blocks differ in
  // length and the longest go first, an even share, but no less than the longest.
  const auto duration = [&]<typename C>(C, double speed) {
    const std::int64_t pieces = (problem.dim_v + C::dim - 1) / C::dim;
    const double blocks =
        static_cast<double>(problem.batch * problem.heads_q * pieces * QueryGrid::of(call, C::queries).tiles);
    const double each = blocks / device.multiprocessors;
    return (Turns::uneven(call) ? std::max(1.0, each / 2) : std::ceil(each)) * C::queries / speed;
  };
  if (problem.dim_qk <= Wide128::dim && Wide128::shared_bytes <= device.shared_bytes) {
    const double wide = duration(Wide128{}, 1);
    const double half = duration(Half128{}, 0.85);
    const double small = duration(Small128{}, 0.65);
    if constexpr (!general) {
      if (takes_short(call, context) && duration(ShortTile{}, 0.98) <= std::min({wide, half, small}))
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

// Where only a band hides, of aligned f32 rows that the GPU's shared memory takes whole.
bool plain_forward(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const std::size_t shared_bytes = device_properties(problem.device.index).shared_bytes;
  const int most = Small128::shared_bytes <= shared_bytes ? Small128::dim : Small64::dim;
  return problem.length_q > 1 && !problem.features.needs_more_than_band() &&
         problem.layout != Layout::paged && !problem.piece.wide_statistics &&
         call.scale != 0 &&  // with none a hidden product, −inf, would not stay hidden
         plain_rows(call.q, problem.dim_qk) && plain_rows(call.k, problem.dim_qk) &&
         plain_rows(call.v, problem.dim_v) && plain_rows(call.o, problem.dim_v) && problem.dim_qk <= most &&
         problem.dim_v <= most;
}

}  // namespace

void fused_forward(const AttentionCall& call, const Context& context) {
  clear_unused_outputs(call, static_cast<cudaStream_t>(context.stream));
  plain_forward(call) ? run_for<false>(call, context) : run_for<true>(call, context);
}

void fused_forward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context) {
  clear_unused_outputs(call, static_cast<cudaStream_t>(context.stream));
  if (!plain_forward(call)) return run_some<Small64, true>(call, heads, context);
  const bool narrow = call.problem.dim_qk <= Half64::dim && call.problem.dim_v <= Half64::dim;
  narrow ? run_some<Half64, false>(call, heads, context) : run_some<Small128, false>(call, heads, context);
}

}  // namespace tilewise::cuda::simt
