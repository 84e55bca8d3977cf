#include "cuda/rope/rope.h"

#include <algorithm>

#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"

namespace tilewise::cuda {
namespace {

// A block has a token: rows of all heads of q and k, and of v where it goes into a cache. A thread
// has pieces of rows: eight pairs, where memory is read 16 bytes at a time, or one.

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

/// A chunk of the first half of a row and its partner of the second.
template <typename T>
__device__ __forceinline__ void turn_halves(const RopeCall& call, const Places& places, std::int64_t b,
                                            std::int64_t angle_row, int piece) {
  constexpr int size = chunk_size<T>;
  const int at = piece * size;
  const int partner = at + static_cast<int>(call.problem.rotary_dim / 2);
  float x[size], y[size], cos[size], sin[size];
  load_chunk(x, reinterpret_cast<const T*>(places.from) + at);
  load_chunk(y, reinterpret_cast<const T*>(places.from) + partner);
  load_angles<T>(cos, call.cos, b, angle_row, at);
  load_angles<T>(sin, call.sin, b, angle_row, at);
  const float sign = call.problem.inverse ? -1.0f : 1.0f;
#pragma unroll
  for (int n = 0; n < size; ++n) {
    const float turned = x[n] * cos[n] - y[n] * (sin[n] * sign);
    y[n] = y[n] * cos[n] + x[n] * (sin[n] * sign);
    x[n] = turned;
  }
  store_piece<T>(places, at, x);
  store_piece<T>(places, partner, y);
}

/// Two chunks of neighbours that are pairs.
template <typename T>
__device__ __forceinline__ void turn_neighbours(const RopeCall& call, const Places& places, std::int64_t b,
                                                std::int64_t angle_row, int piece) {
  constexpr int size = chunk_size<T>;
  const float sign = call.problem.inverse ? -1.0f : 1.0f;
  float cos[size], sin[size];
  load_angles<T>(cos, call.cos, b, angle_row, piece * size);
  load_angles<T>(sin, call.sin, b, angle_row, piece * size);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (2 * piece + half) * size;
    float x[size];
    load_chunk(x, reinterpret_cast<const T*>(places.from) + at);
#pragma unroll
    for (int n = 0; n < size / 2; ++n) {
      const float c = cos[half * (size / 2) + n], s = sin[half * (size / 2) + n] * sign;
      const float turned = x[2 * n] * c - x[2 * n + 1] * s;
      x[2 * n + 1] = x[2 * n + 1] * c + x[2 * n] * s;
      x[2 * n] = turned;
    }
    store_piece<T>(places, at, x);
  }
}

template <typename T>
__device__ __forceinline__ void keep_piece(const Places& places, int at) {
  float x[chunk_size<T>];
  load_chunk(x, reinterpret_cast<const T*>(places.from) + at);
  store_piece<T>(places, at, x);
}

template <typename T, RopePairs pairs>
__global__ void __launch_bounds__(256)
    chunks_kernel(const __grid_constant__ RopeCall call, const __grid_constant__ Pieces pieces) {
  constexpr int size = chunk_size<T>;
  const RopeProblem& problem = call.problem;
  const auto heads = static_cast<int>(problem.heads_q + problem.heads_kv);
  const int turned_pieces = heads * pieces.of_row();
  const int all =
      turned_pieces + (problem.dim_v > 0 ? static_cast<int>(problem.heads_kv) * pieces.values : 0);
  const std::int64_t b = blockIdx.x / problem.length, s = blockIdx.x % problem.length;
  const std::int64_t angle_row = call.angle_row(b, s);
#pragma unroll 2
  for (int index = static_cast<int>(threadIdx.x); index < all; index += static_cast<int>(blockDim.x)) {
    if (index < turned_pieces) {
      const Places places = places_of(call, index / pieces.of_row(), b, s);
      const int piece = index % pieces.of_row();
      if (piece >= pieces.turned) {
        keep_piece<T>(places, static_cast<int>(problem.rotary_dim) + (piece - pieces.turned) * size);
      } else if constexpr (pairs == RopePairs::halves) {
        turn_halves<T>(call, places, b, angle_row, piece);
      } else {
        turn_neighbours<T>(call, places, b, angle_row, piece);
      }
    } else {
      const int h = (index - turned_pieces) / pieces.values;
      const int at = (index - turned_pieces) % pieces.values * size;
      *reinterpret_cast<uint4*>(reinterpret_cast<T*>(call.cache_row(call.v_cache, b, h, s)) + at) =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(call.v.at(b, h, s)) + at);
    }
  }
}

/// Pair by pair, for rows of any alignment.
template <typename T>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ RopeCall call) {
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
  const std::int64_t tokens = problem.batch * problem.length;
  Launch how{.name = "tilewise rope",
             .blocks = tokens,
             .threads = 256,
             .stream = static_cast<cudaStream_t>(context.stream)};
  const bool in_chunks = problem.aligned && has_aligned_rows(call.cos) && has_aligned_rows(call.sin) &&
                         problem.rotary_dim % (2 * size) == 0 && problem.dim % size == 0 &&
                         problem.dim_v % size == 0;
  if (!in_chunks) return launch<elements_kernel<T>>(how, call);
  const Pieces pieces{.turned = static_cast<int>(problem.rotary_dim) / (2 * size),
                      .kept = static_cast<int>(problem.dim - problem.rotary_dim) / size,
                      .values = static_cast<int>(problem.dim_v) / size};
  // Two pieces a thread.
  const std::int64_t of_token = (problem.heads_q + problem.heads_kv) * pieces.of_row() +
                                (problem.dim_v > 0 ? problem.heads_kv * pieces.values : 0);
  how.threads = static_cast<int>(std::clamp<std::int64_t>((of_token + 63) / 64 * 32, 32, 256));
  problem.pairs == RopePairs::halves ? launch<chunks_kernel<T, RopePairs::halves>>(how, call, pieces)
                                     : launch<chunks_kernel<T, RopePairs::interleaved>>(how, call, pieces);
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
