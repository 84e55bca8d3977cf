#include "cuda/rope/simt/rope.h"

#include <algorithm>

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda {
namespace {

/// Where a row of q or k comes from and goes to; either may be null.
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

/// cos and sin of a thread's eight pairs, the same for all heads.
template <typename T>
struct Rotation {
  float cos[chunk_size<T>], sin[chunk_size<T>];

  __device__ __forceinline__ void load(const RopeCall& call, std::int64_t b, std::int64_t row, int piece) {
    load_angles<T>(cos, call.cos, b, row, piece * chunk_size<T>);
    load_angles<T>(sin, call.sin, b, row, piece * chunk_size<T>);
    if (!call.problem.inverse) return;
#pragma unroll
    for (int n = 0; n < chunk_size<T>; ++n) sin[n] = -sin[n];
  }
  __device__ __forceinline__ void apply(float& x, float& y, int n) const {
    const float rotated = x * cos[n] - y * sin[n];
    y = y * cos[n] + x * sin[n];
    x = rotated;
  }
};

/// Turns the pairs of two chunks: of the halves of a row, or neighbours.
template <typename T, RopePairs pairs>
__device__ __forceinline__ void rotate_pairs(float (&x)[chunk_size<T>], float (&y)[chunk_size<T>],
                                             const Rotation<T>& rotation) {
  constexpr int size = chunk_size<T>;
#pragma unroll
  for (int n = 0; n < size; ++n) {
    if constexpr (pairs == RopePairs::halves) {
      rotation.apply(x[n], y[n], n);
    } else if (n < size / 2) {
      rotation.apply(x[2 * n], x[2 * n + 1], n);
    } else {
      rotation.apply(y[2 * n - size], y[2 * n + 1 - size], n);
    }
  }
}

/// q, k or v: where its rows come from and go to, and how blocks share them. A thread has a piece of rows,
/// two chunks of 16 bytes and the pairs in them, or one chunk that is not rotated. It has the same piece of a
/// token's row in several heads, which share the angles.
struct Share {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;                          ///< null where not wanted
  std::byte* to_cache = nullptr;                    ///< likewise
  std::int64_t from_b = 0, from_h = 0, from_s = 0;  ///< strides in bytes
  std::int64_t to_b = 0, to_h = 0, to_s = 0;
  std::int64_t cache_b = 0, cache_h = 0, cache_s = 0;
  int heads = 0;
  int rotated = 0;  ///< pieces of a row
  int kept = 0;     ///< behind them
  int lanes = 0;    ///< heads that a block has at a time
  int blocks = 0;   ///< that share the heads of some tokens

  constexpr int pieces() const { return rotated + kept; }
};

struct Shares {
  Share of[3];
  int tokens_log2 = 0;  ///< tokens of a block
};

constexpr int most_threads = 128;

/// Blocks have a few tokens of a few heads of q, of k or of v. They are short: what they load is on its way
/// at once, and what a multiprocessor has at a time of a tensor lies together.
template <typename T, RopePairs pairs, int heads_each>
__global__ void __launch_bounds__(most_threads)
    chunks_kernel(const __grid_constant__ RopeCall call, const __grid_constant__ Shares shares) {
  constexpr int size = chunk_size<T>;
  let_kernel_behind_begin();
  wait_for_kernel_ahead();
  const RopeProblem& problem = call.problem;
  int group = static_cast<int>(blockIdx.y), which = 0;
  while (group >= shares.of[which].blocks) group -= shares.of[which++].blocks;
  const Share& share = shares.of[which];
  const auto pieces = static_cast<unsigned>(share.pieces()), row = threadIdx.x / pieces;
  const auto piece = static_cast<int>(threadIdx.x - row * pieces);
  const int tokens = 1 << shares.tokens_log2, lane = static_cast<int>(row) >> shares.tokens_log2;
  const unsigned token =
      blockIdx.x * static_cast<unsigned>(tokens) + (row & static_cast<unsigned>(tokens - 1));
  if (lane >= share.lanes || token >= problem.batch * problem.length) return;
  const auto length = static_cast<unsigned>(problem.length);
  const std::int64_t b = problem.batch > 1 ? token / length : 0, s = token - b * length;
  const int first = group * share.lanes * heads_each + lane;
  const auto there = [&](int n) { return first + n * share.lanes < share.heads; };
  const bool rotated = piece < share.rotated;
  const auto rotary = static_cast<int>(problem.rotary_dim);
  const int at_x = !rotated ? (share.rotated > 0 ? rotary : 0) + (piece - share.rotated) * size
                   : pairs == RopePairs::halves ? piece * size
                                                : 2 * piece * size;
  const int at_y = !rotated ? at_x : pairs == RopePairs::halves ? at_x + rotary / 2 : at_x + size;
  RawChunk<T> raw_x[heads_each], raw_y[heads_each];
  const std::byte* from = share.from + b * share.from_b + first * share.from_h + s * share.from_s;
#pragma unroll
  for (int n = 0; n < heads_each; ++n) {
    if (!there(n)) continue;
    const auto* head = reinterpret_cast<const T*>(from + n * (share.lanes * share.from_h));
    raw_x[n].load(head + at_x);
    if (rotated) raw_y[n].load(head + at_y);
  }
  Rotation<T> rotation;
  if (rotated) rotation.load(call, b, call.angle_row(b, s), piece);
  const auto store = [&](std::byte* to, std::int64_t step) {
#pragma unroll
    for (int n = 0; n < heads_each; ++n) {
      if (!there(n)) continue;
      auto* head = reinterpret_cast<T*>(to + n * (share.lanes * step));
      float x[size], y[size];
      raw_x[n].spread(x);
      if (rotated) {
        raw_y[n].spread(y);
        rotate_pairs<T, pairs>(x, y, rotation);
        store_chunk(head + at_y, y);
      }
      store_chunk(head + at_x, x);
    }
  };
  if (share.to != nullptr) {
    store(share.to + b * share.to_b + first * share.to_h + s * share.to_s, share.to_h);
  }
  if (share.to_cache != nullptr) {
    const CacheSlot slot = call.cache_slot(b, s);
    if (!slot.inside) return;
    store(share.to_cache + slot.b * share.cache_b + first * share.cache_h + slot.s * share.cache_s,
          share.cache_h);
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
    auto* to = reinterpret_cast<T*>(call.cache_row(call.v_cache, b, h, s));
    if (to != nullptr) to[d] = reinterpret_cast<const T*>(call.v.at(b, h, s))[d];
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

Share share_of(const Rows& from, const Rows& to, const Rows& cache, std::int64_t heads, int rotated,
               int kept) {
  const auto width = static_cast<std::int64_t>(size_of(from.dtype));
  Share share{.from = from.data,
              .from_b = from.stride_b * width,
              .from_h = from.stride_h * width,
              .from_s = from.stride_s * width,
              .heads = static_cast<int>(heads),
              .rotated = rotated,
              .kept = kept};
  if (to.wanted) {
    share.to = to.data;
    share.to_b = to.stride_b * width, share.to_h = to.stride_h * width, share.to_s = to.stride_s * width;
  }
  if (cache.wanted) {
    share.to_cache = cache.data;
    share.cache_b = cache.stride_b * width, share.cache_h = cache.stride_h * width;
    share.cache_s = cache.stride_s * width;
  }
  return share;
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
                         problem.dim_v % size == 0 && all_tokens <= 0x7fffffff;
  const auto rotated = static_cast<int>(problem.rotary_dim) / (2 * size);
  const auto kept = static_cast<int>(problem.dim - problem.rotary_dim) / size;
  const auto values = static_cast<int>(problem.dim_v) / size;
  const int most_pieces = std::max(rotated + kept, values);
  if (!in_chunks || most_pieces > most_threads) return launch<elements_kernel<T>>(how, call);
  Shares shares{{share_of(call.q, call.out_q, {}, problem.heads_q, rotated, kept),
                 share_of(call.k, call.out_k, call.k_cache, problem.heads_kv, rotated, kept),
                 share_of(call.v, {}, call.v_cache, values > 0 ? problem.heads_kv : 0, 0, values)}};
  const auto share_out = [&](int heads_each) {
    // Runs of memory as long as can be: where a head's rows follow each other, many tokens of few heads;
    // where a token's do, all its heads.
    const bool by_heads =
        call.q.wanted ? call.q.stride_s < call.q.stride_h : call.k.stride_s < call.k.stride_h;
    const std::int64_t heads = std::max(problem.heads_q, problem.heads_kv);
    const std::int64_t lanes = by_heads ? 1 : (heads + heads_each - 1) / heads_each;
    shares.tokens_log2 = 0;
    while ((most_pieces * lanes << (shares.tokens_log2 + 1)) <= most_threads &&
           (1 << shares.tokens_log2) < problem.length) {
      ++shares.tokens_log2;
    }
    how.blocks = (all_tokens + (1 << shares.tokens_log2) - 1) >> shares.tokens_log2;
    how.layers = 0;
    how.threads = most_threads;
    for (Share& share : shares.of) {
      if (share.heads == 0) continue;
      const int most_lanes = (share.heads + heads_each - 1) / heads_each;
      share.lanes = std::min(most_lanes, how.threads / share.pieces() >> shares.tokens_log2);
      share.blocks = (share.heads + share.lanes * heads_each - 1) / (share.lanes * heads_each);
      how.layers += share.blocks;
    }
  };
  share_out(4);
  const auto launch_with = [&]<int heads_each>() {
    problem.pairs == RopePairs::halves
        ? launch<chunks_kernel<T, RopePairs::halves, heads_each>>(how, call, shares)
        : launch<chunks_kernel<T, RopePairs::interleaved, heads_each>>(how, call, shares);
  };
  // Few tokens are shared by as many blocks as there can be.
  if (how.blocks * how.layers >= 2 * device_properties(problem.device.index).multiprocessors) {
    return launch_with.template operator()<4>();
  }
  share_out(1);
  launch_with.template operator()<1>();
}

}  // namespace

void run_rope(const RopeCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { run_of<T>(call, context); });
}

}  // namespace tilewise::cuda
