#include "cuda/rope/rope.h"

#include <algorithm>

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"

namespace tilewise::cuda {
namespace {

// A block has a few tokens: rows of all heads of q and k, and of v where it goes into a cache. A thread has a
// piece of rows: two chunks of 16 bytes and the pairs in them, or one pair.

/// Rows of a token as pieces: how many of a row are turned, and how many are left as they are.
struct Pieces {
  int turned = 0;  ///< a row of q or k
  int kept = 0;    ///< behind them
  int values = 0;  ///< a row of v

  constexpr int of_row() const { return turned + kept; }
};

/// Where a piece of a row of q or k comes from and goes to; either may be null.
struct Places {
  const std::byte* from;
  std::byte* to;
  std::byte* to_cache;
};

__device__ __forceinline__ Places places_of(const RopeCall& call, int head, std::int64_t b, std::int64_t s) {
  const auto heads_q = static_cast<int>(call.problem.heads_q);
  if (head < heads_q) return {call.q.at(b, head, s), call.out_q.at(b, head, s), nullptr};
  const int h = head - heads_q;
  return {call.k.at(b, h, s), call.out_k.wanted ? call.out_k.at(b, h, s) : nullptr,
          call.k_cache.wanted ? call.cache_row(call.k_cache, b, h, s) : nullptr};
}

/// cos and sin of `count` pairs from `first` on.
template <typename T, int count>
__device__ __forceinline__ void load_angles(float (&to)[count], const Angles& angles, std::int64_t b,
                                            std::int64_t row, int first) {
  const std::byte* from = angles.at(b, row);
  if (angles.dtype == DType::f32) {
#pragma unroll
    for (int n = 0; n < count / 4; ++n) {
      *reinterpret_cast<float4*>(to + 4 * n) =
          *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(from) + first + 4 * n);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < count / 4; ++n) {
    const float4 four = load_4(reinterpret_cast<const T*>(from) + first + 4 * n);
    to[4 * n] = four.x, to[4 * n + 1] = four.y, to[4 * n + 2] = four.z, to[4 * n + 3] = four.w;
  }
}

template <typename T>
__device__ __forceinline__ void store_piece(const Places& places, int at,
                                            const float (&values)[chunk_size<T>]) {
  if (places.to != nullptr) store_chunk(reinterpret_cast<T*>(places.to) + at, values);
  if (places.to_cache != nullptr) store_chunk(reinterpret_cast<T*>(places.to_cache) + at, values);
}

/// cos and sin of a thread's eight pairs, the same for all heads.
template <typename T>
struct Turn {
  float cos[chunk_size<T>], sin[chunk_size<T>];

  __device__ __forceinline__ void load(const RopeCall& call, std::int64_t b, std::int64_t row, int piece) {
    load_angles<T>(cos, call.cos, b, row, piece * chunk_size<T>);
    load_angles<T>(sin, call.sin, b, row, piece * chunk_size<T>);
    if (!call.problem.inverse) return;
#pragma unroll
    for (int n = 0; n < chunk_size<T>; ++n) sin[n] = -sin[n];
  }
  __device__ __forceinline__ void apply(float& x, float& y, int n) const {
    const float turned = x * cos[n] - y * sin[n];
    y = y * cos[n] + x * sin[n];
    x = turned;
  }
};

/// Turns the pairs of two chunks: of the halves of a row, or neighbours.
template <typename T, RopePairs pairs>
__device__ __forceinline__ void turn_pairs(float (&x)[chunk_size<T>], float (&y)[chunk_size<T>],
                                           const Turn<T>& turn) {
  constexpr int size = chunk_size<T>;
#pragma unroll
  for (int n = 0; n < size; ++n) {
    if constexpr (pairs == RopePairs::halves) {
      turn.apply(x[n], y[n], n);
    } else if (n < size / 2) {
      turn.apply(x[2 * n], x[2 * n + 1], n);
    } else {
      turn.apply(y[2 * n - size], y[2 * n + 1 - size], n);
    }
  }
}

/// A thread's pieces of q and k: the same piece of a token's row in head after head, `ahead` of them on their
/// way at a time: as many as registers allow beside the blocks that a multiprocessor wants.
template <typename T, RopePairs pairs>
__device__ __forceinline__ void turn_heads(const RopeCall& call, const Pieces& pieces, int piece,
                                           std::int64_t b, std::int64_t s, int first, int step) {
  constexpr int size = chunk_size<T>, ahead = sizeof(T) == 2 ? 2 : 1;
  const RopeProblem& problem = call.problem;
  const auto heads = static_cast<int>(problem.heads_q + problem.heads_kv);
  const bool turned = piece < pieces.turned;
  const auto rotary = static_cast<int>(problem.rotary_dim);
  const int at_x = !turned                      ? rotary + (piece - pieces.turned) * size
                   : pairs == RopePairs::halves ? piece * size
                                                : 2 * piece * size;
  const int at_y = !turned ? at_x : pairs == RopePairs::halves ? at_x + rotary / 2 : at_x + size;
  RawChunk<T> raw_x[ahead], raw_y[ahead];
  const auto load = [&](int n, int head) {
    if (head >= heads) return;
    const auto* from = reinterpret_cast<const T*>(places_of(call, head, b, s).from);
    raw_x[n].load(from + at_x);
    raw_y[n].load(from + at_y);
  };
#pragma unroll
  for (int n = 0; n < ahead; ++n) load(n, first + n * step);
  Turn<T> turn;  // behind the loads above, which need nothing of it
  if (turned) turn.load(call, b, call.angle_row(b, s), piece);
#pragma unroll 1
  for (int group = first; group < heads; group += ahead * step) {
#pragma unroll
    for (int n = 0; n < ahead; ++n) {
      const int head = group + n * step;
      if (head >= heads) continue;
      float x[size], y[size];
      raw_x[n].spread(x);
      raw_y[n].spread(y);
      load(n, head + ahead * step);
      const Places places = places_of(call, head, b, s);
      if (turned) {
        turn_pairs<T, pairs>(x, y, turn);
        store_piece<T>(places, at_y, y);
      }
      store_piece<T>(places, at_x, x);
    }
  }
}

/// Threads have a piece of a row each, of as many tokens and heads as there are threads for, and go on to the
/// next heads.
template <typename T, RopePairs pairs>
__global__ void __launch_bounds__(256, sizeof(T) == 2 ? 3 : 4)
    chunks_kernel(const __grid_constant__ RopeCall call, const __grid_constant__ Pieces pieces,
                  const int tokens) {
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  constexpr int size = chunk_size<T>;
  const RopeProblem& problem = call.problem;
  // Blocks that share a token take heads by turns.
  const int thread = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(gridDim.y * blockDim.x);
  const std::int64_t first_token = std::int64_t{blockIdx.x} * tokens;
  const auto count =
      static_cast<int>(min(std::int64_t{tokens}, problem.batch * problem.length - first_token));
  const int piece = thread % pieces.of_row(), token = thread / pieces.of_row() % tokens;
  const int head = thread / (pieces.of_row() * tokens), step = threads / (pieces.of_row() * tokens);
  if (head < step && token < count) {
    const auto at = static_cast<unsigned>(first_token + token),
               length = static_cast<unsigned>(problem.length);
    turn_heads<T, pairs>(call, pieces, piece, at / length, at % length, head, step);
  }
  if (problem.dim_v == 0) return;
  const int values = static_cast<int>(problem.heads_kv) * pieces.values;
  for (int index = thread; index < values * count; index += threads) {
    const std::int64_t at = first_token + index / values;
    const std::int64_t b = at / problem.length, s = at % problem.length;
    const int h = index % values / pieces.values, column = index % pieces.values * size;
    *reinterpret_cast<uint4*>(reinterpret_cast<T*>(call.cache_row(call.v_cache, b, h, s)) + column) =
        *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(call.v.at(b, h, s)) + column);
  }
}

/// Pair by pair, for rows of any alignment.
template <typename T>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ RopeCall call) {
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const RopeProblem& problem = call.problem;
  const std::int64_t b = blockIdx.x / problem.length, s = blockIdx.x % problem.length;
  const std::int64_t angle_row = call.angle_row(b, s);
  const std::int64_t pairs = problem.rotary_dim / 2;
  const std::int64_t of_row = pairs + problem.dim - problem.rotary_dim;
  const float sign = problem.inverse ? -1.0f : 1.0f;
  const auto angle = [&](const Angles& angles, std::int64_t n) {
    return load_element(angles.at(b, angle_row) + n * static_cast<std::int64_t>(size_of(angles.dtype)),
                        angles.dtype);
  };
  const std::int64_t all = (problem.heads_q + problem.heads_kv) * of_row;
  for (std::int64_t index = threadIdx.x; index < all; index += blockDim.x) {
    const Places places = places_of(call, static_cast<int>(index / of_row), b, s);
    const auto* from = reinterpret_cast<const T*>(places.from);
    const auto store = [&](std::int64_t at, T value) {
      if (places.to != nullptr) reinterpret_cast<T*>(places.to)[at] = value;
      if (places.to_cache != nullptr) reinterpret_cast<T*>(places.to_cache)[at] = value;
    };
    const std::int64_t n = index % of_row;
    if (n >= pairs) {
      store(n + pairs, from[n + pairs]);
      continue;
    }
    const bool halves = problem.pairs == RopePairs::halves;
    const std::int64_t at_x = halves ? n : 2 * n, at_y = halves ? n + pairs : 2 * n + 1;
    const float x = widen(from[at_x]), y = widen(from[at_y]);
    const float cos = angle(call.cos, n), sin = angle(call.sin, n) * sign;
    store(at_x, narrow<T>(x * cos - y * sin));
    store(at_y, narrow<T>(y * cos + x * sin));
  }
  const std::int64_t values = problem.dim_v > 0 ? problem.heads_kv * problem.dim_v : 0;
  for (std::int64_t index = threadIdx.x; index < values; index += blockDim.x) {
    const std::int64_t h = index / problem.dim_v, d = index % problem.dim_v;
    reinterpret_cast<T*>(call.cache_row(call.v_cache, b, h, s))[d] =
        reinterpret_cast<const T*>(call.v.at(b, h, s))[d];
  }
}

bool has_aligned_rows(const Angles& angles) {
  const auto width = static_cast<std::int64_t>(size_of(angles.dtype));
  return (reinterpret_cast<std::uintptr_t>(angles.data) |
          static_cast<std::uintptr_t>(angles.stride_row * width) |
          static_cast<std::uintptr_t>(angles.stride_b * width)) %
             16 ==
         0;
}

template <typename T>
void run_of(const RopeCall& call, const Context& context) {
  constexpr int size = chunk_size<T>;
  const RopeProblem& problem = call.problem;
  const std::int64_t all_tokens = problem.batch * problem.length;
  Launch how{.name = "tilewise rope",
             .blocks = all_tokens,
             .threads = 256,
             .stream = static_cast<cudaStream_t>(context.stream),
             .early = begins_early(problem.device)};
  const bool in_chunks = problem.aligned && has_aligned_rows(call.cos) && has_aligned_rows(call.sin) &&
                         problem.rotary_dim % (2 * size) == 0 && problem.dim % size == 0 &&
                         problem.dim_v % size == 0;
  const Pieces pieces{.turned = static_cast<int>(problem.rotary_dim) / (2 * size),
                      .kept = static_cast<int>(problem.dim - problem.rotary_dim) / size,
                      .values = static_cast<int>(problem.dim_v) / size};
  if (!in_chunks || pieces.of_row() > how.threads) return launch<elements_kernel<T>>(how, call);
  // Where a head's rows follow each other, several tokens make longer runs of memory.
  const bool by_heads = problem.length >= 4 && all_tokens <= 0x7fffffff && call.q.stride_s < call.q.stride_h;
  const int tokens = by_heads && 4 * pieces.of_row() <= how.threads ? 4 : 1;
  how.blocks = (all_tokens + tokens - 1) / tokens;
  // Four heads a thread at least, where there are so many; few tokens are shared by several blocks, in which
  // a thread has two heads at most.
  const std::int64_t heads = problem.heads_q + problem.heads_kv;
  const std::int64_t room =
      2 * device_properties(problem.device.index).multiprocessors / std::max<std::int64_t>(how.blocks, 1);
  const std::int64_t together = room > 1 ? 2 : 4;
  how.threads = static_cast<int>(std::clamp<std::int64_t>(
      ((heads + together - 1) / together * pieces.of_row() * tokens + 31) / 32 * 32, 32, how.threads));
  const std::int64_t all_pieces = heads * pieces.of_row() * tokens;
  how.layers = static_cast<int>(
      std::clamp<std::int64_t>(room, 1, std::max<std::int64_t>(1, all_pieces / (2 * how.threads))));
  problem.pairs == RopePairs::halves
      ? launch<chunks_kernel<T, RopePairs::halves>>(how, call, pieces, tokens)
      : launch<chunks_kernel<T, RopePairs::interleaved>>(how, call, pieces, tokens);
}

}  // namespace

void run_rope(const RopeCall& call, const Context& context) {
  switch (call.problem.dtype) {
    case DType::f16: return run_of<__half>(call, context);
    case DType::bf16: return run_of<__nv_bfloat16>(call, context);
    default: return run_of<float>(call, context);
  }
}

}  // namespace tilewise::cuda
