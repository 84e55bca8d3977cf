#include "core/arena.h"
#include "cuda/attention/common/backward/peaks.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/simt/backward/stage.cuh"
#include "cuda/attention/simt/backward/tile_pairs.cuh"
#include "cuda/attention/simt/fused.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/dynamic_shared.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"

namespace tilewise::cuda::simt {

// Peaks (peaks.h) among the pairs of two tiles, and row sums over the pairs that are no peaks.

/// Records the peaks among a lane's pairs and takes them out of dS. The slots for all of the lane's rows are
/// reserved first, in one batch of atomics, because each has the latency of global memory.
template <typename C>
__device__ __forceinline__ void record_peaks(const Stage<C, Side::keys, false>& stage, const Peaks& peaks,
                                             const QueryTile& query, const KeyTile& keys,
                                             const Place<C>& place) {
  const std::int64_t first_row =
      query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first;
  unsigned high[C::M];  // one bit per column: whether the pair is a peak
  int next[C::M];       // the row's next free slot
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const int r = place.other(m);
    high[m] = 0;
#pragma unroll
    for (int n = 0; n < C::N; ++n) {
      high[m] |= stage.p[r * C::pair_stride + place.own(n)] > peak_weight ? 1u << n : 0u;
    }
    next[m] = 0;
    if (high[m] != 0) next[m] = atomicAdd(peaks.count + first_row + r, __popc(high[m]));
  }
#pragma unroll
  for (int m = 0; m < C::M; ++m) {
    const std::int64_t row = first_row + place.other(m);
#pragma unroll 1
    for (; high[m] != 0; high[m] &= high[m] - 1, ++next[m]) {
      const int c = place.own(__ffs(static_cast<int>(high[m])) - 1);
      const int at = place.other(m) * C::pair_stride + c;
      const float p = stage.p[at];
      if (next[m] >= most_peaks) {  // LSE is far off. The pair counts as no peak.
        atomicAdd(peaks.rest_weight + row, p);
        continue;
      }
      peaks.first[row * most_peaks + next[m]] = {keys.first + c, p, stage.ds[at] / p};
      stage.ds[at] = 0;
    }
  }
}

/// Adds P and dS of the pairs that are no peaks to the sums of their rows.
template <typename C>
__device__ __forceinline__ void add_non_peaks(const Stage<C, Side::keys, false>& stage, const Peaks& peaks,
                                              const QueryTile& query) {
  constexpr int lanes = C::threads / C::tile;  // lanes that share a row
  const int r = static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int at = r * C::pair_stride + lane * 4;
  float p_sum = 0;
  float ds_sum = 0;
#pragma unroll 4
  for (int c = 0; c < C::tile; c += 4 * lanes) {
    const float4 p = load_four(stage.p + at + c);
    const float4 ds = load_four(stage.ds + at + c);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float one = element(p, n);
      p_sum += one > peak_weight ? 0.0f : one;
      ds_sum += element(ds, n);
    }
  }
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) {  // both at once, to pay the shuffles' latency once
    p_sum += __shfl_xor_sync(~0u, p_sum, apart);
    ds_sum += __shfl_xor_sync(~0u, ds_sum, apart);
  }
  if (lane != 0 || r >= query.count) return;
  const std::int64_t row = query.h * stage.call.rows_q() + stage.call.first_row_q(query.b) + query.first + r;
  atomicAdd(peaks.rest_weight + row, p_sum);
  atomicAdd(peaks.rest_gradient + row, ds_sum);
}

// The products that make gradients from P and dS. A CTA keeps the gradients of its own tile in registers and
// stores them at its end. It adds dQ to global memory after each pair of tiles.

/// The elements of its half's gradient, [own, piece], that a lane holds: 8 x 8, or 4 x 8 with small tiles.
template <typename C>
struct OwnElements {
  int rows, dims;  // the lane's first row and dim; it holds runs of four
  __device__ explicit OwnElements(const Place<C>& place)
      : rows(place.in_half % 2 * C::R + place.lane.row), dims(place.in_half / 2 * 16 + place.lane.column) {}
  __device__ int row(int m) const { return in_runs<2 * C::R>(rows, m); }
  __device__ int dim(int n) const { return in_runs<C::C>(dims, n); }
};

template <typename C>
__device__ __forceinline__ void add_to_own(float (&sum)[C::own_each][8], const float* pairs,
                                           const float* rows, int count, const OwnElements<C>& at) {
  add_product(sum, Transposed<C::pair_stride, 2 * C::R>{pairs + at.rows * 4},
              Transposed<C::row_stride, C::C>{rows + at.dims * 4}, (count + 7) / 8 * 8);
}

template <typename C, bool general>
__device__ __forceinline__ void store_own(const Rows& rows, const float (&sum)[C::own_each][8], float factor,
                                          int valid, int first_dim, int dims, const OwnElements<C>& at,
                                          std::int64_t b, std::int64_t h, std::int64_t first_row) {
  const bool aligned = general && aligned_rows(rows, dims);
#pragma unroll
  for (int m = 0; m < C::own_each; ++m) {
    const int r = at.row(m);
    if (r >= valid) continue;
    std::byte* to = rows.at(b, h, first_row + r) + first_dim * size_of(rows.dtype);
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const float4 four{factor * sum[m][n], factor * sum[m][n + 1], factor * sum[m][n + 2],
                        factor * sum[m][n + 3]};
      if constexpr (general) {
        store_chunk(to, rows.dtype, at.dim(n), dims - first_dim, aligned, four);
      } else if (at.dim(n) < dims) {
        store_4(reinterpret_cast<float*>(to) + at.dim(n), four);
      }
    }
  }
}

/// dQ += dS·K, by all warps. Each warp computes a quarter of the queries and 64 dims.
template <typename C, bool general>
__device__ __forceinline__ void add_dq(const Stage<C, Side::keys, general>& stage, const Rows& dq_sum,
                                       const QueryTile& query, const KeyTile& keys, int piece,
                                       const Place<C>& place) {
  constexpr int rows_each = C::tile / 16;
  const int first_row = place.warp % 4 * (C::tile / 4);
  const int first_dim = place.warp / 4 * 64;
  float dq[rows_each][8] = {};
  multiply_rows_transposed(
      dq, ByRows<C::pair_stride, C::R>{stage.ds + (first_row + place.lane.row) * C::pair_stride},
      Transposed<C::row_stride, C::C>{stage.own + first_dim + place.lane.column * 4},
      (keys.count + 7) / 8 * 8);
  const auto scale = static_cast<float>(stage.call.scale);
  const int dims = stage.dims_qk(piece);
  const bool aligned = !general || aligned_rows(dq_sum, stage.dim_qk);
  const std::int64_t s = query.sequence.first_q + query.first;
#pragma unroll
  for (int m = 0; m < rows_each; ++m) {
    const int r = first_row + in_steps<C::R>(place.lane.row, m);
    if (r >= query.count) continue;
    auto* to = reinterpret_cast<float*>(dq_sum.at(query.b, query.h, s + r)) + piece * C::dim;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      const int d = first_dim + in_runs<C::C>(place.lane.column, n);
      if (d >= dims) continue;
      if (aligned) {
        add_4(to + d, {scale * dq[m][n], scale * dq[m][n + 1], scale * dq[m][n + 2], scale * dq[m][n + 3]});
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (d + k < dims) atomicAdd(to + d + k, scale * dq[m][n + k]);
        }
      }
    }
  }
}

/// Adds the sums of the query heads of a group, in local memory, so that each head has a running sum of its
/// own: the error of a running sum grows with its length. This matters where tiles may be as small as a block
/// mask's blocks; with full tiles it makes no difference.
template <typename C>
class GroupSum {
 public:
  __device__ void add(float (&sum)[C::own_each][8]) {
    float* sums = in_memory(sums_);
#pragma unroll
    for (int n = 0; n < C::own_each * 8; ++n) {
      sums[n] = any_ ? sums[n] + sum[n / 8][n % 8] : sum[n / 8][n % 8];
      sum[n / 8][n % 8] = 0;
    }
    any_ = true;
  }
  __device__ void join(float (&sum)[C::own_each][8]) {
    if (!any_) return;
    const float* sums = in_memory(sums_);
#pragma unroll
    for (int n = 0; n < C::own_each * 8; ++n) sum[n / 8][n % 8] += sums[n];
  }

 private:
  float sums_[C::own_each * 8];
  bool any_ = false;
};

namespace {

// Backward by recomputation. A CTA keeps a tile of keys and walks over the queries that see it, with five
// products for each pair of tiles. The row states take two products more where they cannot come from O and
// LSE. dK and dV are summed in registers. dQ is added to global memory by atomics, in any order. For a
// deterministic dQ, a second kernel keeps queries and walks over keys, at the price of two products more.
// Both kernels are one template with the two sides exchanged.

enum class Gradients {
  all,      // own tile: keys; computes dK, dV, and dQ by atomics
  keys,     // own tile: keys; computes dK and dV
  queries,  // own tile: queries; computes dQ
};
constexpr Side side_of(Gradients gradients) {
  return gradients == Gradients::queries ? Side::queries : Side::keys;
}

// Computes the gradients of the own tile with that index.
template <typename C, bool general, Gradients gradients>
__device__ __forceinline__ void compute_tile(const AttentionCall& call, const Blocks& blocks,
                                             const RowStates& states, const Peaks& peaks, const Rows& dq_sum,
                                             const SomeHeads& heads, std::uint32_t index, float* shared) {
  constexpr Side side = side_of(gradients);
  const int piece = static_cast<int>(index % static_cast<std::uint32_t>(blocks.dim_pieces));
  const Place<C> place;
  const OwnElements<C> own_elements(place);
  const Stage<C, side, general> stage(call, shared);
  Pairs<side, general> pairs(call, blocks, index / static_cast<std::uint32_t>(blocks.dim_pieces));
  if (!heads.has_group(call, pairs.query.b, pairs.query.h / call.group())) return;
  const bool has_peaks = !general && peaks.count != nullptr && !is_short(pairs.query.sequence);
  // Side::keys: dV in the first half of the warps, dK in the second. Side::queries: both halves have a
  // partial dQ, each of half of the keys.
  float sum[C::own_each][8] = {};
  GroupSum<C> group;

  bool more = pairs.next();
  if (more && stage.whole()) {
    stage.load_own(pairs.query, pairs.keys, 0);
    stage.load_other(pairs.query, pairs.keys, 0);
    stage.load_states(pairs.query, states);
    commit_copies();
  }
  while (more) {
    const QueryTile query = pairs.query;
    const KeyTile keys = pairs.keys;
    if (!stage.whole()) {
      __syncthreads();  // all threads have read the last row states, which the loads overwrite
      stage.load_states(query, states);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();  // all threads' copies have arrived
    const ScoreRule rules(call, query.b, query.h);
    differentiate(stage, rules, query, keys, true, place, [&](float highest) {
      if constexpr (!general && gradients == Gradients::all) {
        if (has_peaks && highest > peak_weight) record_peaks<C>(stage, peaks, query, keys, place);
      }
    });
    if (!stage.whole()) {
      __syncthreads();  // all warps have read the last piece, and dS is stored
      stage.load_other(query, keys, piece);
      if (gradients == Gradients::all) stage.load_own(query, keys, piece);
      commit_copies();
      wait_copies<0>();
      __syncthreads();  // all threads' copies of the CTA's piece have arrived
    } else {
      __syncthreads();  // dS is stored
    }
    if constexpr (side == Side::keys) {
      if (!general || !place.second || rules.adds_dk)
        add_to_own(sum, place.second ? stage.ds : stage.p, place.second ? stage.other : stage.other_v,
                   query.count, own_elements);
    } else {
      const int first = place.second ? C::tile / 2 : 0;
      add_to_own(sum, stage.ds + first * C::pair_stride, stage.other + first * C::row_stride,
                 min(C::tile / 2, max(0, keys.count - first)), own_elements);
    }
    __syncthreads();  // all warps have read the other tile, which the next loads overwrite
    more = pairs.next();
    if constexpr (general && side == Side::keys) {
      if (more && pairs.query.h != query.h) group.add(sum);
    }
    if (more && stage.whole()) {  // the next tile is copied while dQ is computed
      stage.load_other(pairs.query, pairs.keys, 0);
      stage.load_states(pairs.query, states);
      commit_copies();
    }
    if constexpr (!general && gradients == Gradients::all) {
      if (has_peaks) add_non_peaks<C>(stage, peaks, query);
    }
    if constexpr (gradients == Gradients::all) {
      if (piece < stage.pieces_qk) add_dq(stage, dq_sum, query, keys, piece, place);
    }
  }

  group.join(sum);
  const QueryTile& query = pairs.query;
  const auto scale = static_cast<float>(call.scale);
  const int first_dim = piece * C::dim;
  if constexpr (side == Side::keys) {
    const Rows& rows = place.second ? call.dk : call.dv;
    const int dims = place.second ? stage.dim_qk : stage.dim_v;
    if (!rows.wanted || first_dim >= dims) return;
    store_own<C, general>(rows, sum, place.second ? scale : 1.0f, pairs.keys.count, first_dim, dims,
                          own_elements, query.b, call.key_head(query.h),
                          query.sequence.first_k + pairs.keys.first);
  } else {
    float* partial = stage.own;  // [own_each, 8, half of the threads]: the second half's partial dQ
    const int thread = static_cast<int>(threadIdx.x) % (C::threads / 2);
    __syncthreads();  // all warps have read the own tile, which the sums overwrite
#pragma unroll
    for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (place.second) partial[(m * 8 + n) * (C::threads / 2) + thread] = sum[m][n];
      }
    }
    __syncthreads();  // the second half's sums are stored
    if (place.second) return;
#pragma unroll
    for (int m = 0; m < C::own_each; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[m][n] += partial[(m * 8 + n) * (C::threads / 2) + thread];
    }
    store_own<C, general>(dq_sum.wanted ? dq_sum : call.dq, sum, scale, query.count, first_dim, stage.dim_qk,
                          own_elements, query.b, query.h, query.sequence.first_q + query.first);
  }
}

template <typename C, bool general, Gradients gradients>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_backward(const __grid_constant__ AttentionCall call, const Blocks blocks, const RowStates states,
                   const Peaks peaks, const Rows dq_sum) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  let_next_kernel_start();
  wait_for_previous_kernel();
  if constexpr (runs_in_code(C::shared_bytes)) {
    compute_tile<C, general, gradients>(call, blocks, states, peaks, dq_sum, {}, blockIdx.x, shared);
  }
}

// For selected heads, often none. The grid is one wave of CTAs that look for selected tiles.
template <typename C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    fused_backward_of_some(const __grid_constant__ AttentionCall call, const Blocks blocks,
                           const RowStates states, const Peaks peaks, const Rows dq_sum,
                           const SomeHeads heads, std::uint32_t count) {
  TILEWISE_DYNAMIC_SHARED(float, shared, 16);
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (heads.none()) return;
  if constexpr (runs_in_code(C::shared_bytes)) {
    for (std::uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
      compute_tile<C, false, Gradients::all>(call, blocks, states, peaks, dq_sum, heads, index, shared);
      __syncthreads();  // all warps have read shared memory, which the next tile overwrites
    }
  }
}

// Whether row states may come from O and LSE, with a correction of the peaks afterwards. Where all keys or
// all values are the same, or the sequence is short, correcting the peaks would not be exact enough.
bool from_outputs(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  return plain_backward(call) && !call.delta.wanted && call.dq.wanted && (call.dk.wanted || call.dv.wanted) &&
         !call.deterministic && !problem.features.sinks && problem.most_keys > short_keys &&
         problem.length_q >= short_queries && call.k.stride_s != 0 && call.v.stride_s != 0;
}

// Computes the row states of the selected heads from O and LSE; of short sequences, from scores.
void states_from_outputs(const AttentionCall& call, const RowStates& states, const Peaks& peaks,
                         const SomeHeads& heads, const Context& context) {
  row_states_of_outputs(call, states, peaks, heads, static_cast<cudaStream_t>(context.stream));
  const bool some_may_be_short = call.packed() || call.key_lengths.data != nullptr;
  if (some_may_be_short) row_states_of_short(call, states, heads, context);
}

// Whether the kernel that keeps keys computes dQ, too. dQ alone is cheaper by the kernel that keeps queries.
bool adds_dq(const AttentionCall& call) {
  return call.dq.wanted && (call.dk.wanted || call.dv.wanted) && !call.deterministic;
}

struct Workspace {
  RowStates states;
  float* row_sums = nullptr;    // [Hq, rows_q]: dS summed over keys, for a mask with one element per row
  Rows dq_sum;                  // the f32 accumulator of dQ: dQ itself if it is f32
  float* logit_rows = nullptr;  // [Hq, rows_q]: each row's term of dlogit_scale
  Peaks peaks;
  std::size_t bytes;

  Workspace(const AttentionCall& call, void* data) {
    Arena arena(data);
    const std::int64_t rows = call.problem.heads_q * call.rows_q();
    states = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows)};
    if (sums_rows(call)) row_sums = arena.take<float>(rows);
    if (call.dlogit_scale != nullptr) logit_rows = arena.take<float>(rows);
    if (adds_dq(call) || call.dlogit_scale != nullptr) {
      dq_sum = call.dq;
      if (call.dq.dtype != DType::f32) {
        const std::int64_t stride = (call.problem.dim_qk + 3) / 4 * 4;
        dq_sum = {.data = reinterpret_cast<std::byte*>(arena.take<float>(rows * stride)),
                  .dtype = DType::f32,
                  .stride_b = call.packed() ? 0 : call.problem.length_q * stride,
                  .stride_h = call.rows_q() * stride,
                  .stride_s = stride,
                  .wanted = true};
      }
    }
    if (from_outputs(call)) peaks = Peaks(arena, rows);
    bytes = arena.used();
  }
};

// Rounds the accumulator of dQ to dQ's type.
__global__ void narrow_dq(const __grid_constant__ AttentionCall call, const Rows dq_sum) {
  const std::int64_t dim = call.problem.dim_qk;
  const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t row = index / dim;
  if (row >= call.problem.heads_q * call.rows_q()) return;
  const std::int64_t h = row / call.rows_q();
  const std::int64_t b = call.packed() ? 0 : row % call.rows_q() / call.problem.length_q;
  const std::int64_t s = call.packed() ? row % call.rows_q() : row % call.rows_q() % call.problem.length_q;
  if (call.packed() && s >= call.cumulative_q.at(call.problem.batch)) return;  // no sequence owns the row
  store_element(call.dq.at(b, h, s) + index % dim * static_cast<std::int64_t>(size_of(call.dq.dtype)),
                call.dq.dtype, reinterpret_cast<const float*>(dq_sum.at(b, h, s))[index % dim]);
}

template <typename C, bool general, Gradients gradients>
void run(const AttentionCall& call, const Workspace& workspace, cudaStream_t stream) {
  const AttentionProblem& problem = call.problem;
  const auto pieces = [](std::int64_t dim) { return static_cast<int>((dim + C::dim - 1) / C::dim); };
  const bool of_queries = gradients == Gradients::queries;
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile),
                      of_queries ? pieces(problem.dim_qk) : pieces(std::max(problem.dim_qk, problem.dim_v))};
  launch<fused_backward<C, general, gradients>>(
      {.name = of_queries ? "tilewise fused backward, queries" : "tilewise fused backward, keys",
       .blocks = problem.batch * blocks.dim_pieces *
                 (of_queries ? problem.heads_q * blocks.queries.tiles : problem.heads_kv * blocks.keys.tiles),
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = stream,
       // Where two CTAs fit into an SM, CTAs that start early would share one while other SMs stay empty.
       .early = C::blocks == 1 && has_pdl(problem.device)},
      call, blocks, workspace.states, workspace.peaks, workspace.dq_sum);
}

template <typename C, bool general>
void run(const AttentionCall& call, const Workspace& workspace, cudaStream_t stream) {
  const bool of_keys = call.dk.wanted || call.dv.wanted;
  if (adds_dq(call)) return run<C, general, Gradients::all>(call, workspace, stream);
  if (call.dq.wanted) run<C, general, Gradients::queries>(call, workspace, stream);
  if (of_keys) run<C, general, Gradients::keys>(call, workspace, stream);
}

template <typename C>
void run_some(const AttentionCall& call, const Workspace& workspace, const SomeHeads& heads,
              const Context& context) {
  const AttentionProblem& problem = call.problem;
  const Blocks blocks{QueryGrid::of(call, C::tile), KeyGrid::of(call, C::tile)};
  const std::int64_t count = problem.batch * problem.heads_kv * blocks.keys.tiles;
  launch<fused_backward_of_some<C>>(
      {.name = "tilewise fused backward, some heads",
       .blocks =
           std::min<std::int64_t>(count, C::blocks * device_properties(context.device.index).multiprocessors),
       .threads = C::threads,
       .shared_bytes = C::shared_bytes,
       .stream = static_cast<cudaStream_t>(context.stream),
       .early = has_pdl(context.device)},
      call, blocks, workspace.states, workspace.peaks, workspace.dq_sum, heads,
      static_cast<std::uint32_t>(count));
}

template <bool general>
void run_for(const AttentionCall& call, const Workspace& workspace, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  switch (backward_size(call, context)) {
    case BackwardSize::small: return run<Small, general>(call, workspace, stream);
    case BackwardSize::narrow: return run<Narrow, general>(call, workspace, stream);
    case BackwardSize::broad: return run<Broad, general>(call, workspace, stream);
  }
}

}  // namespace

std::size_t fused_backward_workspace(const AttentionCall& call) { return Workspace(call, nullptr).bytes; }

bool takes_some_heads(const AttentionCall& call) { return from_outputs(call); }

std::size_t some_heads_shared_bytes(std::int64_t dim) {
  return dim > Narrow::dim ? Broad::shared_bytes : Narrow::shared_bytes;
}

void fused_backward_of(const AttentionCall& call, const SomeHeads& heads, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Workspace workspace(call, context.workspace.data);
  states_from_outputs(call, workspace.states, workspace.peaks, heads, context);
  const bool broad = call.problem.dim_qk > Narrow::dim || call.problem.dim_v > Narrow::dim;
  broad ? run_some<Broad>(call, workspace, heads, context)
        : run_some<Narrow>(call, workspace, heads, context);
  mend_peaks(call, workspace.peaks, heads, stream);
  clear_unused_gradients(call, stream);
}

void fused_backward(const AttentionCall& call, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Workspace workspace(call, context.workspace.data);
  const RowStates& states = workspace.states;
  const Rows& dq_sum = workspace.dq_sum;
  if (from_outputs(call)) {
    states_from_outputs(call, states, workspace.peaks, {}, context);
  } else {
    row_states(call, states, workspace.row_sums, dq_sum, context);
  }
  plain_backward(call) ? run_for<false>(call, workspace, context) : run_for<true>(call, workspace, context);
  if (from_outputs(call)) mend_peaks(call, workspace.peaks, {}, stream);
  if (call.dlogit_scale != nullptr) {
    logit_scale_rows(call, dq_sum, workspace.logit_rows, stream);
    logit_scale_gradient(call, workspace.logit_rows, stream);
  }
  if (dq_sum.wanted && dq_sum.data != call.dq.data) {
    launch<narrow_dq>({.name = "tilewise narrow dq",
                       .blocks = (call.problem.heads_q * call.rows_q() * call.problem.dim_qk + 255) / 256,
                       .threads = 256,
                       .stream = stream},
                      call, dq_sum);
  }
  if (call.problem.features.mask_gradient) mask_gradient(call, states, workspace.row_sums, context);
  if (call.dsinks != nullptr) sink_gradient(call, states, stream);
  clear_unused_gradients(call, stream);
}

}  // namespace tilewise::cuda::simt
