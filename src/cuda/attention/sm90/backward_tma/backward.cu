#include "cuda/attention/sm90/backward_tma/backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/arena.h"
#include "cuda/attention/sm90/backward_tma/kernel.cuh"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/tensor_map.h"

namespace tilewise::cuda::wgmma_tma {
namespace {

// Three launches: delta, tiles, dQ. Each begins before the one ahead has ended (programmatic dependent
// launch).

constexpr int row_threads = 256;

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

// Statistics of the rows, 16 lanes each, padding included, and dQ's sums cleared.
template <typename T, int row>
__global__ void __launch_bounds__(row_threads) delta_kernel(const __grid_constant__ DeltaParams params) {
  constexpr Config c = rows[row];
  constexpr int lanes = 16;
  wait_for_kernel_ahead();
  let_kernel_behind_begin();
  const Sizes& sizes = params.sizes;
  const Workspace& workspace = params.workspace;
  const std::int64_t heads = std::int64_t{sizes.batch} * sizes.heads_q;
  const std::int64_t padded = std::int64_t{workspace.tiles} * c.queries;
  const std::int64_t thread = std::int64_t{blockIdx.x} * row_threads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * row_threads;
  if (workspace.dq != nullptr) {
    auto* dq = reinterpret_cast<float4*>(workspace.dq);
    for (std::int64_t n = thread; n < heads * padded * (c.dim / 4); n += threads) dq[n] = {};
  }
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (std::int64_t first = std::int64_t{blockIdx.x} * (row_threads / lanes); first < heads * padded;
       first += threads / lanes) {
    const std::int64_t index = first + threadIdx.x / lanes;
    const std::int64_t head = index / padded, s = index % padded;
    const std::int64_t b = head / sizes.heads_q, h = head % sizes.heads_q;
    const bool valid = index < heads * padded && s < sizes.length_q;
    float sum = 0;
    if (valid && lane * 8 < sizes.dim_v) {
      const auto eight = [&](const Rows& of) {
        return *reinterpret_cast<const uint4*>(row_of_halves(of, b, h, s) + lane * 16);
      };
      sum = dot_of_eight<T>(eight(params.o), eight(params.d_o));
    }
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane != 0 || index >= heads * padded) continue;
    float lse = minus_infinity, d_lse = 0;
    if (valid) {
      lse = *reinterpret_cast<const float*>(params.lse.at(b, h, s));
      if (params.d_lse.wanted) d_lse = *reinterpret_cast<const float*>(params.d_lse.at(b, h, s));
    }
    const bool sees_nothing = lse == minus_infinity;
    workspace.lse[index] = sees_nothing ? -minus_infinity : lse * 1.4426950408889634f;
    workspace.delta[index] = sees_nothing ? 0.0f : sum - d_lse;
  }
}

// dQ from its sums, a tile a block. Rows pass through shared memory, so that they are written 16 bytes at a
// time.
template <typename T, int row>
__global__ void __launch_bounds__(row_threads) dq_kernel(const __grid_constant__ DqParams params) {
  constexpr Config c = rows[row];
  constexpr int chunks = c.dim / 8;
  __shared__ __align__(16) uint4 rows_smem[c.queries * (chunks + 1)];
  wait_for_kernel_ahead();
  let_kernel_behind_begin();
  const Sizes& sizes = params.sizes;
  const int tile = static_cast<int>(blockIdx.x) % params.workspace.tiles;
  const int head = static_cast<int>(blockIdx.x) / params.workspace.tiles;
  const float* from = params.workspace.dq + std::int64_t{blockIdx.x} * (c.dim * c.queries);
  for (int index = static_cast<int>(threadIdx.x); index < c.queries * chunks; index += row_threads) {
    const int r = index % c.queries, chunk = index / c.queries;
    const float* first =
        from + (chunk / 2 * (c.queries / 8) + r / 8) * 128 + r % 8 / 2 * 4 + chunk % 2 * 2 + r % 2;
    std::uint32_t word[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      word[n] = pack<T>(first[2 * n * 16] * params.scale, first[(2 * n + 1) * 16] * params.scale);
    }
    rows_smem[r * (chunks + 1) + chunk] = {word[0], word[1], word[2], word[3]};
  }
  __syncthreads();  // all rows are there
  std::byte* to = row_of_halves(params.dq, head / sizes.heads_q, head % sizes.heads_q, 0);
  for (int index = static_cast<int>(threadIdx.x); index < c.queries * chunks; index += row_threads) {
    const int r = index / chunks, chunk = index % chunks;
    const std::int64_t s = std::int64_t{tile} * c.queries + r;
    if (s >= sizes.length_q || chunk * 8 >= sizes.dim_qk) continue;
    *reinterpret_cast<uint4*>(to + s * params.dq.stride_s * 2 + chunk * 16) =
        rows_smem[r * (chunks + 1) + chunk];
  }
}

int row_of(const AttentionProblem& problem) {
  return std::max(problem.dim_qk, problem.dim_v) <= rows[0].dim ? 0 : 1;
}

Sizes sizes_of(const AttentionCall& call) {
  const AttentionProblem& problem = call.problem;
  const auto whole = [](std::int64_t x) { return static_cast<int>(x); };
  return {.batch = whole(problem.batch),
          .heads_q = whole(problem.heads_q),
          .heads_kv = whole(problem.heads_kv),
          .group = whole(call.group()),
          .length_q = whole(problem.length_q),
          .length_k = whole(problem.length_k),
          .dim_qk = whole(problem.dim_qk),
          .dim_v = whole(problem.dim_v),
          .left = call.band.left,
          .right = call.band.right,
          .bottom_right = call.alignment == Alignment::bottom_right,
          .key_lengths = call.key_lengths.data,
          .key_lengths_stride = call.key_lengths.stride[0]};
}

Workspace workspace_of(const AttentionCall& call, Arena& arena) {
  const Config& c = rows[row_of(call.problem)];
  const std::int64_t heads = call.problem.batch * call.problem.heads_q;
  Workspace workspace;
  workspace.tiles = static_cast<int>((call.problem.length_q + c.queries - 1) / c.queries);
  workspace.lse = arena.take<float>(heads, workspace.tiles, c.queries);
  workspace.delta = arena.take<float>(heads, workspace.tiles, c.queries);
  if (call.dq.wanted) workspace.dq = arena.take<float>(heads, workspace.tiles, c.queries, c.dim);
  return workspace;
}

template <typename T, int row>
void run(const AttentionCall& call, const Context& context) {
  constexpr Config c = rows[row];
  const AttentionProblem& problem = call.problem;
  Arena arena(context.workspace.data);
  const Workspace workspace = workspace_of(call, arena);
  const Sizes sizes = sizes_of(call);
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t query_tiles = heads * workspace.tiles;
  const auto scale = static_cast<float>(call.scale);

  launch<delta_kernel<T, row>>({.name = "tilewise wgmma backward, delta",
                                .blocks = std::min<std::int64_t>(query_tiles * c.queries * 16 / row_threads,
                                                                 16 * std::int64_t{multiprocessors}),
                                .threads = row_threads,
                                .stream = stream,
                                .early = true},
                               DeltaParams{sizes, call.o, call.d_o, call.lse, call.d_lse, workspace});

  const std::int64_t key_tiles = (problem.length_k + c.keys - 1) / c.keys;
  const std::int64_t head_bytes = call.group() * problem.length_q * (6 * problem.dim_qk + 2 * problem.dim_v);
  const Turns turns =
      Turns::of(call, problem.batch * problem.heads_kv, key_tiles, head_bytes, multiprocessors);
  const auto map_queries = [&](const Rows& of, std::int64_t dim) {
    return map_of(of, problem.batch, problem.heads_q, problem.length_q, dim, c.queries);
  };
  const auto map_keys = [&](const Rows& of, std::int64_t dim) {
    return map_of(of, problem.batch, problem.heads_kv, problem.length_k, dim, c.keys);
  };
  launch<tile_kernel<T, row>>({.name = "tilewise wgmma backward, tiles",
                               .blocks = problem.batch * problem.heads_kv * key_tiles,
                               .threads = c.threads,
                               .shared_bytes = c.shared_bytes(),
                               .stream = stream,
                               .early = true},
                              TileParams{.q = map_queries(call.q, problem.dim_qk),
                                         .k = map_keys(call.k, problem.dim_qk),
                                         .v = map_keys(call.v, problem.dim_v),
                                         .d_o = map_queries(call.d_o, problem.dim_v),
                                         .sizes = sizes,
                                         .k_rows = call.k,
                                         .v_rows = call.v,
                                         .dk = call.dk,
                                         .dv = call.dv,
                                         .workspace = workspace,
                                         .turns = turns,
                                         .scale = scale,
                                         .wants_dq = call.dq.wanted});

  if (!call.dq.wanted) return;
  launch<dq_kernel<T, row>>({.name = "tilewise wgmma backward, dq",
                             .blocks = query_tiles,
                             .threads = row_threads,
                             .stream = stream,
                             .early = true},
                            DqParams{sizes, call.dq, workspace, scale});
}

template <int row>
void run_row(const AttentionCall& call, const Context& context) {
  call.problem.dtype == DType::f16 ? run<__half, row>(call, context) : run<__nv_bfloat16, row>(call, context);
}

}  // namespace

std::string unsuited(const AttentionProblem& problem) {
  const AttentionFeatures& features = problem.features;
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "takes f16 and bf16";
  if (problem.strict) return "rounds weights and score gradients, which strict precision does not allow";
  if (problem.layout != Layout::dense) return "takes dense sequences";
  if (features.mask != MaskKind::none || features.block_mask || features.dropout || features.softcap ||
      features.alibi || features.sinks) {
    return "takes causal, windows and key lengths alone";
  }
  if (problem.backward.deterministic) return "adds dq in no fixed order";
  if (problem.dim_qk > most_dim || problem.dim_v > most_dim)
    return "takes head dims to " + std::to_string(most_dim);
  if (problem.dim_qk % 8 != 0 || problem.dim_v % 8 != 0 || !problem.aligned ||
      !problem.backward.aligned_rows || !problem.backward.ordered_rows) {
    return "copies rows from multiples of 16 bytes, with such strides, alone";
  }
  constexpr std::int64_t most_length = 1 << 29;  // positions, tiles past the end too, fit 32 bits
  if (problem.length_q >= most_length || problem.length_k >= most_length)
    return "takes sequences of fewer than 2^29";
  if (problem.batch * problem.heads_q * (problem.length_q / 64 + 1) > 0x7fffffff)
    return "takes fewer than 2^31 tiles";
  if (problem.length_q == 0 || problem.length_k == 0) return "takes no less than one query and one key";
  return {};
}

std::size_t backward_workspace(const AttentionCall& call) {
  Arena arena(nullptr);
  workspace_of(call, arena);
  return arena.used();
}

void backward(const AttentionCall& call, const Context& context) {
  row_of(call.problem) == 0 ? run_row<0>(call, context) : run_row<1>(call, context);
}

}  // namespace tilewise::cuda::wgmma_tma
