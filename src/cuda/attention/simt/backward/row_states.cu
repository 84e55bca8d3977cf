#include <algorithm>

#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/simt/backward/tile_pairs.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

// What backward must know of each query first. Every score and every d_o·v is made once more for it: o and
// lse give the same for two products less, but rounded, and where a row's weights all but one vanish the
// rounding is all that is left of its gradient (peaks.h tells where that can be mended).

// One thread's share of a row's keys.
struct PartialRow {
  float top = -3.402823466e38f;
  double sum = 0;       // of exp(s − top)
  double weighted = 0;  // of exp(s − top)·(d_o·v), after dropout
};

__device__ __forceinline__ void raise(PartialRow& row, float top) {
  if (!(top > row.top)) return;
  const double factor = exp(static_cast<double>(row.top) - static_cast<double>(top));
  row.sum *= factor;
  row.weighted *= factor;
  row.top = top;
}

// A sum of products with what its roundings lose kept beside it (TwoSum): equal d_o·v must cancel later.
struct LosslessSum {
  float sum = 0;
  float lost = 0;

  __device__ void add(float a, float b) {
    const float product = __fmul_rn(a, b);
    const float next = __fadd_rn(sum, product);
    const float grown = __fsub_rn(next, sum);
    lost += __fadd_rn(__fsub_rn(sum, __fsub_rn(next, grown)), __fsub_rn(product, grown));
    lost += __fmaf_rn(a, b, -product);
    sum = next;
  }
  __device__ double value() const { return static_cast<double>(sum) + static_cast<double>(lost); }
};

template <bool general>
__device__ __forceinline__ double d_lse_of(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                           std::int64_t s) {
  if (!call.d_lse.wanted) return 0;
  return general ? statistic_of(call.d_lse, b, h, s)
                 : static_cast<double>(*reinterpret_cast<const float*>(call.d_lse.at(b, h, s)));
}

// A query that saw other keys, too, by lse and delta of them all.
struct RowOfShare {
  double lse, shift, among;

  __device__ RowOfShare(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t s)
      : lse(statistic_of(call.lse, b, h, s)),
        shift(d_lse_of<true>(call, b, h, s) - statistic_of(call.delta, b, h, s)),
        among(log(static_cast<double>(call.problem.length_k + 1))) {}

  __device__ bool unseen() const { return isinf(lse); }
  // A score that the keys' weights would have if they were alike: s − top, which is rounded, is small for
  // the weights that count. What f32 does not keep of it is in the factor.
  __device__ RowState state() const {
    const auto top = static_cast<float>(lse - among);
    return unseen() ? RowState::unseen()
                    : RowState{top, static_cast<float>(exp(static_cast<double>(top) - lse)),
                               static_cast<float>(shift)};
  }
  // The sum of the score gradients of these keys.
  __device__ float row_sum(const PartialRow& row) const {
    if (unseen() || row.sum == 0) return 0;
    return static_cast<float>((row.weighted + row.sum * shift) * exp(static_cast<double>(row.top) - lse));
  }
};

// `scores` and `dweights` are [keys, queries].
template <typename C>
__device__ __forceinline__ void add_tile(PartialRow& row, const float* scores, const float* dweights,
                                         int query, int first, int last) {
  float top = minus_infinity;
  for (int j = first; j < last; ++j) top = fmaxf(top, scores[j * C::pair_stride + query]);
  raise(row, top);
  float sum = 0;
  LosslessSum weighted;
#pragma unroll 4
  for (int j = first; j < last; ++j) {
    const float weight = weight_of(scores[j * C::pair_stride + query], row.top);
    sum += weight;
    weighted.add(weight, dweights[j * C::pair_stride + query]);
  }
  row.sum += static_cast<double>(sum);
  row.weighted += weighted.value();
}

// The first half leaves scores, −inf where hidden, in place of weights.
template <typename C, bool general>
__device__ __forceinline__ void store_scores(const Stage<C, Side::queries, general>& stage,
                                             const ScoreRules& rules, const QueryTile& query,
                                             const KeyTile& keys, const Place<C>& place,
                                             const float (&products)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
  const auto score = [&](int m, int n) -> float& {
    return stage.weights[place.other(m) * C::pair_stride + place.own(n)];
  };
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n)
      score(m, n) = general ? products[m][n] : __fmul_rn(products[m][n], rules.scale);
  }
  const bool edge = has_edge<C>(call, query, keys);
  if (!general && !edge) return;
#pragma unroll 1
  for (int index = 0; index < C::M * C::N; ++index) {  // a lane meets what it stored itself
    const int m = index / C::N;
    const int n = index % C::N;
    const std::int64_t i = query.first + min(place.own(n), query.count - 1);
    const std::int64_t j = keys.first + place.other(m);
    float tangent;
    if (edge && hidden(call, query.sequence, keys, i, j)) {
      score(m, n) = minus_infinity;
    } else if (general) {
      score(m, n) = score_of<true>(call, rules, query.sequence, query.b, query.h, i, j, score(m, n), tangent);
    }
  }
}

// The second half leaves d_o·v in place of score gradients.
template <typename C, bool general>
__device__ __forceinline__ void store_dweights(const Stage<C, Side::queries, general>& stage,
                                               const QueryTile& query, const KeyTile& keys,
                                               const Place<C>& place, const float (&products)[C::M][C::N]) {
  const auto dweight = [&](int m, int n) -> float& {
    return stage.dscores[place.other(m) * C::pair_stride + place.own(n)];
  };
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) dweight(m, n) = products[m][n];
  }
  if constexpr (general) {
    if (!stage.call.problem.features.dropout) return;
#pragma unroll 1
    for (int index = 0; index < C::M * C::N; ++index) {
      const int m = index / C::N;
      const int n = index % C::N;
      dweight(m, n) *= dropout_factor<true>(stage.call, query.b, query.h, query.first + place.own(n),
                                            keys.first + place.other(m));
    }
  }
}

// Whose states are found: everyone's, or those of short sequences.
struct Whose {
  bool only_short = false;
  SomeHeads heads{};

  __device__ bool has(const AttentionCall& call, const QueryTile& query) const {
    if (!only_short) return true;
    return is_short(query.sequence) && heads.has_group(call, query.b, query.h / call.group());
  }
};

// What a block does with the tile of queries of that index.
template <typename C, bool general>
__device__ __forceinline__ void find_states(const AttentionCall& call, const Blocks& blocks,
                                            const RowStates& states, float* row_sums, const Rows& dq_sum,
                                            const Whose& whose, std::uint32_t tile, float* shared) {
  const Place<C> place;
  const Stage<C, Side::queries, general> stage(call, shared);
  Pairs<Side::queries, general> pairs(call, blocks, tile);
  const QueryTile& query = pairs.query;
  if (query.count <= 0 || !whose.has(call, query)) return;
  const ScoreRules rules(call, query.b, query.h);
  constexpr int parts = C::threads / C::tile;  // threads that share a query
  constexpr int part_keys = C::tile / parts;
  const int r = static_cast<int>(threadIdx.x) % C::tile;
  const int part = static_cast<int>(threadIdx.x) / C::tile;
  PartialRow row;

  bool more = pairs.next();
  if (more && stage.whole()) {
    stage.load_own(query, pairs.keys, 0);
    stage.load_other(query, pairs.keys, 0);
    commit_copies();
  }
  while (more) {
    const KeyTile keys = pairs.keys;
    wait_copies<0>();
    __syncthreads();  // what was loaded is there, and everyone is done with the last scores
    float products[C::M][C::N] = {};
    multiply_pairs(stage, query, keys, place, products);
    if (place.second) {
      store_dweights(stage, query, keys, place, products);
    } else {
      store_scores(stage, rules, query, keys, place, products);
    }
    __syncthreads();  // scores and d_o·v are there, and everyone is done with the keys
    more = pairs.next();
    if (more && stage.whole()) {
      stage.load_other(query, pairs.keys, 0);
      commit_copies();
    }
    add_tile<C>(row, stage.weights, stage.dscores, r, part * part_keys,
                min((part + 1) * part_keys, keys.count));
  }

  if (dq_sum.wanted) {
    for (int index = threadIdx.x; index < query.count * stage.dim_qk; index += C::threads) {
      const std::int64_t s = query.sequence.first_q + query.first + index / stage.dim_qk;
      reinterpret_cast<float*>(dq_sum.at(query.b, query.h, s))[index % stage.dim_qk] = 0;
    }
  }
  __syncthreads();  // shared memory is free for the shares
  auto* shares = reinterpret_cast<PartialRow*>(shared);
  shares[threadIdx.x] = row;
  __syncthreads();  // all shares are there
  if (part > 0 || r >= query.count) return;
  for (int n = 1; n < parts; ++n) {
    PartialRow other = shares[n * C::tile + r];
    raise(row, other.top);
    raise(other, row.top);
    row.sum += other.sum;
    row.weighted += other.weighted;
  }
  const std::int64_t s = query.sequence.first_q + query.first + r;
  const std::int64_t at = query.h * call.rows_q() + call.first_row_q(query.b) + query.first + r;
  double sink = 0;
  if (call.problem.features.sinks) {
    raise(row, static_cast<float>(call.sinks.at(query.b, query.h)));
    sink = exp(call.sinks.at(query.b, query.h) - static_cast<double>(row.top));
  }
  const double total = row.sum + sink;
  const bool unseen = row.sum == 0 && sink == 0;
  if constexpr (general) {
    if (call.delta.wanted) {  // the keys are a share of the row's
      const RowOfShare share(call, query.b, query.h, s);
      states.set(at, share.state());
      if (row_sums != nullptr) row_sums[at] = share.row_sum(row);
      return;
    }
  }
  const double d_lse = d_lse_of<general>(call, query.b, query.h, s);
  const double delta = row.weighted / total;
  states.set(at, unseen
                     ? RowState::unseen()
                     : RowState{row.top, static_cast<float>(1 / total), static_cast<float>(d_lse - delta)});
  if (row_sums == nullptr) return;
  row_sums[at] = row.sum == 0 ? 0.0f : static_cast<float>((row.sum * d_lse + sink * delta) / total);
}

template <typename C, bool general>
__global__ void __launch_bounds__(C::threads, C::blocks)
    row_states_tiles(const __grid_constant__ AttentionCall call, const Blocks blocks, const RowStates states,
                     float* row_sums, const Rows dq_sum, const Whose whose, std::uint32_t tiles) {
  if (whose.heads.none()) return;
  if constexpr (runs_in_code(C::shared_bytes)) {
    TILEWISE_DYNAMIC_SHARED(float, shared, 16);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      find_states<C, general>(call, blocks, states, row_sums, dq_sum, whose, tile, shared);
      __syncthreads();  // everyone is done with shared memory
    }
  }
}

struct Found {
  const RowStates& states;
  float* row_sums = nullptr;
  Rows dq_sum{};
  Whose whose{};
};

// For short sequences, which are often none, as many blocks as can be there at once look for some.
template <typename C, bool general>
void run(const AttentionCall& call, const Found& found, const Context& context) {
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile)};
  const std::int64_t tiles = call.problem.batch * call.problem.heads_q * blocks.queries.tiles;
  const std::int64_t most =
      found.whose.only_short ? C::blocks * device_properties(context.device.index).multiprocessors : tiles;
  launch<row_states_tiles<C, general>>({.name = "tilewise row states",
                                        .blocks = std::min(tiles, most),
                                        .threads = C::threads,
                                        .shared_bytes = C::shared_bytes,
                                        .stream = static_cast<cudaStream_t>(context.stream)},
                                       call, blocks, found.states, found.row_sums, found.dq_sum, found.whose,
                                       static_cast<std::uint32_t>(tiles));
}

template <bool general>
void run_for(const AttentionCall& call, const Found& found, const Context& context) {
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small, general>(call, found, context);
    case BackwardSize::narrow: return run<Narrow, general>(call, found, context);
    case BackwardSize::broad: return run<Broad, general>(call, found, context);
  }
}

// The states of a piece's queries, by lse and delta of all their keys. One warp per query.
constexpr int share_threads = 256;

__global__ void __launch_bounds__(share_threads)
    states_of_share(const __grid_constant__ AttentionCall call, const RowStates states, const Rows dq_sum) {
  const std::int64_t index = (std::int64_t{blockIdx.x} * share_threads + threadIdx.x) / 32;
  const std::int64_t b = index / call.problem.length_q / call.problem.heads_q;
  const std::int64_t h = index / call.problem.length_q % call.problem.heads_q;
  const std::int64_t i = index % call.problem.length_q;
  if (b >= call.problem.batch) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) states.set(h * call.rows_q() + call.first_row_q(b) + i, RowOfShare(call, b, h, i).state());
  if (!dq_sum.wanted) return;
  auto* dq = reinterpret_cast<float*>(dq_sum.at(b, h, i));
  for (std::int64_t d = lane; d < call.problem.dim_qk; d += 32) dq[d] = 0;
}

}  // namespace

void row_states(const AttentionCall& call, const RowStates& states, float* row_sums, const Rows& dq_sum,
                const Context& context) {
  if (call.delta.wanted && row_sums == nullptr) {
    const std::int64_t rows = call.problem.batch * call.problem.heads_q * call.problem.length_q;
    return launch<states_of_share>({.name = "tilewise row states of a share",
                                    .blocks = (rows * 32 + share_threads - 1) / share_threads,
                                    .threads = share_threads,
                                    .stream = static_cast<cudaStream_t>(context.stream)},
                                   call, states, dq_sum);
  }
  const Found found{.states = states, .row_sums = row_sums, .dq_sum = dq_sum};
  plain_backward(call) ? run_for<false>(call, found, context) : run_for<true>(call, found, context);
}

void row_states_of_short(const AttentionCall& call, const RowStates& states, const SomeHeads& heads,
                         const Context& context) {
  run_for<false>(call, {.states = states, .whose = {.only_short = true, .heads = heads}}, context);
}

}  // namespace tilewise::cuda::simt
