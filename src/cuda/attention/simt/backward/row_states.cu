#include <algorithm>

#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/simt/backward/tile_pairs.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {
namespace {

// The row states that backward needs of each query, computed from S and dP. O and LSE give them without these
// two products, but rounded. In a row where all of P but one element vanishes, that rounding would be all
// that is left of the gradient (peaks.h says where this can be corrected).

// The softmax of the keys of a row that one thread has.
struct PartialRow {
  float maximum = lowest;
  double sum = 0;     // Σ exp(s − maximum)
  double sum_dp = 0;  // Σ exp(s − maximum)·dP, after dropout
};

__device__ __forceinline__ void raise(PartialRow& row, float maximum) {
  if (!(maximum > row.maximum)) return;
  const double factor = exp(static_cast<double>(row.maximum) - static_cast<double>(maximum));
  row.sum *= factor;
  row.sum_dp *= factor;
  row.maximum = maximum;
}

// A sum of products that keeps its rounding errors in a second sum (TwoSum): equal dP must cancel later.
struct CompensatedDot {
  float sum = 0;
  float error = 0;

  __device__ void add(float a, float b) {
    const float product = __fmul_rn(a, b);
    const float next = __fadd_rn(sum, product);
    const float added = __fsub_rn(next, sum);
    error += __fadd_rn(__fsub_rn(sum, __fsub_rn(next, added)), __fsub_rn(product, added));
    error += __fmaf_rn(a, b, -product);
    sum = next;
  }
  __device__ double value() const { return static_cast<double>(sum) + static_cast<double>(error); }
};

template <bool general>
__device__ __forceinline__ double d_lse_of(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                           std::int64_t s) {
  if (!call.d_lse.wanted) return 0;
  return general ? statistic_of(call.d_lse, b, h, s)
                 : static_cast<double>(*reinterpret_cast<const float*>(call.d_lse.at(b, h, s)));
}

// A row whose keys are a share of all its keys. LSE and delta of all keys are given.
struct RowOfShare {
  double lse, shift, log_keys;

  __device__ RowOfShare(const AttentionCall& call, std::int64_t b, std::int64_t h, std::int64_t s)
      : lse(statistic_of(call.lse, b, h, s)),
        shift(d_lse_of<true>(call, b, h, s) - statistic_of(call.delta, b, h, s)),
        log_keys(log(static_cast<double>(call.problem.length_k + 1))) {}

  __device__ bool unseen() const { return isinf(lse); }
  // `top` is the score that every key would have if all had the same P: s − top, which is rounded, is then
  // small where P matters. `inverse` makes up for the rounding of `top` to f32.
  __device__ RowState state() const {
    const auto top = static_cast<float>(lse - log_keys);
    return unseen() ? RowState::unseen()
                    : RowState{top, static_cast<float>(exp(static_cast<double>(top) - lse)),
                               static_cast<float>(shift)};
  }
  // Σ dS over these keys.
  __device__ float row_sum(const PartialRow& row) const {
    if (unseen() || row.sum == 0) return 0;
    return static_cast<float>((row.sum_dp + row.sum * shift) * exp(static_cast<double>(row.maximum) - lse));
  }
};

// Adds keys [first, last) of a tile to a row. `s` and `dp` are [keys, queries].
template <typename C>
__device__ __forceinline__ void add_tile(PartialRow& row, const float* s, const float* dp, int query,
                                         int first, int last) {
  float maximum = minus_infinity;
  for (int j = first; j < last; ++j) maximum = fmaxf(maximum, s[j * C::pair_stride + query]);
  raise(row, maximum);
  float sum = 0;
  CompensatedDot sum_dp;
#pragma unroll 4
  for (int j = first; j < last; ++j) {
    const float p = exponential(s[j * C::pair_stride + query], row.maximum);
    sum += p;
    sum_dp.add(p, dp[j * C::pair_stride + query]);
  }
  row.sum += static_cast<double>(sum);
  row.sum_dp += sum_dp.value();
}

// The epilogue of the first half: stores S, −inf where hidden, in the place of P.
template <typename C, bool general>
__device__ __forceinline__ void store_s(const Stage<C, Side::queries, general>& stage, const ScoreRule& rules,
                                        const QueryTile& query, const KeyTile& keys, const Place<C>& place,
                                        const float (&acc)[C::M][C::N]) {
  const AttentionCall& call = stage.call;
  const auto score = [&](int m, int n) -> float& {
    return stage.p[place.other(m) * C::pair_stride + place.own(n)];
  };
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) score(m, n) = general ? acc[m][n] : __fmul_rn(acc[m][n], rules.scale);
  }
  const bool edge = has_edge<C>(call, query, keys);
  if (!general && !edge) return;
#pragma unroll 1
  for (int index = 0; index < C::M * C::N; ++index) {  // a lane reads only what it stored itself
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

// The epilogue of the second half: stores dP, after dropout, in the place of dS.
template <typename C, bool general>
__device__ __forceinline__ void store_dp(const Stage<C, Side::queries, general>& stage,
                                         const QueryTile& query, const KeyTile& keys, const Place<C>& place,
                                         const float (&acc)[C::M][C::N]) {
  const auto element = [&](int m, int n) -> float& {
    return stage.ds[place.other(m) * C::pair_stride + place.own(n)];
  };
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
#pragma unroll
    for (int n = 0; n < C::N; ++n) element(m, n) = acc[m][n];
  }
  if constexpr (general) {
    if (!stage.call.problem.features.dropout) return;
#pragma unroll 1
    for (int index = 0; index < C::M * C::N; ++index) {
      const int m = index / C::N;
      const int n = index % C::N;
      element(m, n) *= dropout_factor<true>(stage.call, query.b, query.h, query.first + place.own(n),
                                            keys.first + place.other(m));
    }
  }
}

// The rows whose states are computed: all, or those of short sequences and selected heads.
struct RowSelection {
  bool only_short = false;
  SomeHeads heads{};

  __device__ bool has(const AttentionCall& call, const QueryTile& query) const {
    if (!only_short) return true;
    return is_short(query.sequence) && heads.has_group(call, query.b, query.h / call.group());
  }
};

// Computes the row states of the query tile with that index.
template <typename C, bool general>
__device__ __forceinline__ void compute_states(const AttentionCall& call, const Blocks& blocks,
                                               const RowStates& states, float* row_sums, const Rows& dq_sum,
                                               const RowSelection& selection, std::uint32_t tile,
                                               float* shared) {
  const Place<C> place;
  const Stage<C, Side::queries, general> stage(call, shared);
  Pairs<Side::queries, general> pairs(call, blocks, tile);
  const QueryTile& query = pairs.query;
  if (query.count <= 0 || !selection.has(call, query)) return;
  const ScoreRule rules(call, query.b, query.h);
  constexpr int threads_per_query = C::threads / C::tile;
  constexpr int keys_each = C::tile / threads_per_query;
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
    __syncthreads();  // all threads' copies have arrived, and all have read the last S and dP
    float products[C::M][C::N] = {};
    multiply_pairs(stage, query, keys, place, products);
    if (place.second) {
      store_dp(stage, query, keys, place, products);
    } else {
      store_s(stage, rules, query, keys, place, products);
    }
    __syncthreads();  // S and dP are stored, and all warps have read the keys
    more = pairs.next();
    if (more && stage.whole()) {
      stage.load_other(query, pairs.keys, 0);
      commit_copies();
    }
    add_tile<C>(row, stage.p, stage.ds, r, part * keys_each, min((part + 1) * keys_each, keys.count));
  }

  if (dq_sum.wanted) {
    for (int index = threadIdx.x; index < query.count * stage.dim_qk; index += C::threads) {
      const std::int64_t s = query.sequence.first_q + query.first + index / stage.dim_qk;
      reinterpret_cast<float*>(dq_sum.at(query.b, query.h, s))[index % stage.dim_qk] = 0;
    }
  }
  __syncthreads();  // all threads have read shared memory, which the partial rows overwrite
  auto* partial_rows = reinterpret_cast<PartialRow*>(shared);
  partial_rows[threadIdx.x] = row;
  __syncthreads();  // all partial rows are stored
  if (part > 0 || r >= query.count) return;
  for (int n = 1; n < threads_per_query; ++n) {
    PartialRow other = partial_rows[n * C::tile + r];
    raise(row, other.maximum);
    raise(other, row.maximum);
    row.sum += other.sum;
    row.sum_dp += other.sum_dp;
  }
  const std::int64_t s = query.sequence.first_q + query.first + r;
  const std::int64_t at = query.h * call.rows_q() + call.first_row_q(query.b) + query.first + r;
  double sink = 0;
  if (call.problem.features.sinks) {
    raise(row, static_cast<float>(call.sinks.at(query.b, query.h)));
    sink = exp(call.sinks.at(query.b, query.h) - static_cast<double>(row.maximum));
  }
  const double total = row.sum + sink;
  const bool unseen = row.sum == 0 && sink == 0;
  if constexpr (general) {
    if (call.delta.wanted) {  // the call has a share of the row's keys
      const RowOfShare share(call, query.b, query.h, s);
      states.set(at, share.state());
      if (row_sums != nullptr) row_sums[at] = share.row_sum(row);
      return;
    }
  }
  const double d_lse = d_lse_of<general>(call, query.b, query.h, s);
  const double delta = row.sum_dp / total;
  states.set(
      at, unseen ? RowState::unseen()
                 : RowState{row.maximum, static_cast<float>(1 / total), static_cast<float>(d_lse - delta)});
  if (row_sums == nullptr) return;
  row_sums[at] = row.sum == 0 ? 0.0f : static_cast<float>((row.sum * d_lse + sink * delta) / total);
}

template <typename C, bool general>
__global__ void __launch_bounds__(C::threads, C::blocks)
    row_states_tiles(const __grid_constant__ AttentionCall call, const Blocks blocks, const RowStates states,
                     float* row_sums, const Rows dq_sum, const RowSelection selection, std::uint32_t tiles) {
  if (selection.heads.none()) return;
  if constexpr (runs_in_code(C::shared_bytes)) {
    TILEWISE_DYNAMIC_SHARED(float, shared, 16);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      compute_states<C, general>(call, blocks, states, row_sums, dq_sum, selection, tile, shared);
      __syncthreads();  // all threads have read shared memory, which the next tile overwrites
    }
  }
}

struct Outputs {
  const RowStates& states;
  float* row_sums = nullptr;
  Rows dq_sum{};
  RowSelection selection{};
};

// For short sequences, often none, the grid is one wave of CTAs that look for some.
template <typename C, bool general>
void run(const AttentionCall& call, const Outputs& outputs, const Context& context) {
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile)};
  const std::int64_t tiles = call.problem.batch * call.problem.heads_q * blocks.queries.tiles;
  const std::int64_t most = outputs.selection.only_short
                                ? C::blocks * device_properties(context.device.index).multiprocessors
                                : tiles;
  launch<row_states_tiles<C, general>>({.name = "tilewise row states",
                                        .blocks = std::min(tiles, most),
                                        .threads = C::threads,
                                        .shared_bytes = C::shared_bytes,
                                        .stream = static_cast<cudaStream_t>(context.stream)},
                                       call, blocks, outputs.states, outputs.row_sums, outputs.dq_sum,
                                       outputs.selection, static_cast<std::uint32_t>(tiles));
}

template <bool general>
void run_for(const AttentionCall& call, const Outputs& outputs, const Context& context) {
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small, general>(call, outputs, context);
    case BackwardSize::narrow: return run<Narrow, general>(call, outputs, context);
    case BackwardSize::broad: return run<Broad, general>(call, outputs, context);
  }
}

// Row states where the call has a share of the keys: from LSE and delta of all keys. One warp per query.
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
  const Outputs outputs{.states = states, .row_sums = row_sums, .dq_sum = dq_sum};
  plain_backward(call) ? run_for<false>(call, outputs, context) : run_for<true>(call, outputs, context);
}

void row_states_of_short(const AttentionCall& call, const RowStates& states, const SomeHeads& heads,
                         const Context& context) {
  run_for<false>(call, {.states = states, .selection = {.only_short = true, .heads = heads}}, context);
}

}  // namespace tilewise::cuda::simt
