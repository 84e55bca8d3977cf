#include "cuda/rope/simt/rope.h"

#include <algorithm>

#include "cuda/ptx/dependent.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/with_type.h"

namespace tilewise::cuda {
namespace {

/// Where a row of q or k is read and written. Either destination may be null.
struct RowPointers {
  const std::byte* from;
  std::byte* to;
  std::byte* to_cache;
};

__device__ __forceinline__ RowPointers row_pointers(const RopeCall& call, int head, std::int64_t b,
                                                    std::int64_t s) {
  const auto heads_q = static_cast<int>(call.problem.heads_q);
  if (head < heads_q) return {call.q.at(b, head, s), call.out_q.at(b, head, s), nullptr};
  const int h = head - heads_q;
  return {call.k.at(b, h, s), call.out_k.wanted ? call.out_k.at(b, h, s) : nullptr,
          call.k_cache.wanted ? call.cache_row(call.k_cache, b, h, s) : nullptr};
}

/// Loads `count` angles, cosines or sines, from pair `first` on.
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

/// cos and sin of the pairs in a thread's item, the same for all heads.
template <typename T>
struct Rotation {
  float cos[chunk_size<T>], sin[chunk_size<T>];

  __device__ __forceinline__ void load(const RopeCall& call, std::int64_t b, std::int64_t row, int item) {
    load_angles<T>(cos, call.cos, b, row, item * chunk_size<T>);
    load_angles<T>(sin, call.sin, b, row, item * chunk_size<T>);
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

/// Rotates the pairs of two chunks. With `halves`, x is in the first and y in the second half of the rotary
/// dims; with `interleaved`, pairs are neighbouring elements.
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

/// One of q, k and v: where its rows are read and written, and how CTAs divide the work. A thread has one
/// item of a row: two chunks of 16 bytes with the pairs in them, or one chunk that is not rotated. It has the
/// same item of a token in several heads, which share the angles.
struct RotaryTensor {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;                          ///< null if there is no such output
  std::byte* to_cache = nullptr;                    ///< null if there is no cache
  std::int64_t from_b = 0, from_h = 0, from_s = 0;  ///< strides in bytes
  std::int64_t to_b = 0, to_h = 0, to_s = 0;
  std::int64_t cache_b = 0, cache_h = 0, cache_s = 0;
  int heads = 0;
  int rotated = 0;  ///< items of a row that are rotated
  int kept = 0;     ///< items behind them that are copied
  int lanes = 0;    ///< heads that a CTA has at a time
  int blocks = 0;   ///< CTAs that divide the heads of some tokens

  constexpr int items() const { return rotated + kept; }
};

struct RotaryTensors {
  RotaryTensor of[3];   ///< q, k, v
  int tokens_log2 = 0;  ///< of the tokens that a CTA has
};

constexpr int most_threads = 128;

/// A CTA has a few tokens of a few heads of q, of k or of v. CTAs are short: all loads of a CTA are in flight
/// at once, and the rows that an SM works on at a time are close together in memory.
template <typename T, RopePairs pairs, int heads_each>
__global__ void __launch_bounds__(most_threads)
    chunks_kernel(const __grid_constant__ RopeCall call, const __grid_constant__ RotaryTensors tensors) {
  constexpr int size = chunk_size<T>;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const RopeProblem& problem = call.problem;
  int group = static_cast<int>(blockIdx.y), which = 0;
  while (group >= tensors.of[which].blocks) group -= tensors.of[which++].blocks;
  const RotaryTensor& tensor = tensors.of[which];
  const auto items = static_cast<unsigned>(tensor.items()), row = threadIdx.x / items;
  const auto item = static_cast<int>(threadIdx.x - row * items);
  const int tokens = 1 << tensors.tokens_log2, lane = static_cast<int>(row) >> tensors.tokens_log2;
  const unsigned token =
      blockIdx.x * static_cast<unsigned>(tokens) + (row & static_cast<unsigned>(tokens - 1));
  if (lane >= tensor.lanes || token >= problem.batch * problem.length) return;
  const auto length = static_cast<unsigned>(problem.length);
  const std::int64_t b = problem.batch > 1 ? token / length : 0, s = token - b * length;
  const int first = group * tensor.lanes * heads_each + lane;
  const auto inside = [&](int n) { return first + n * tensor.lanes < tensor.heads; };
  const bool rotated = item < tensor.rotated;
  const auto rotary = static_cast<int>(problem.rotary_dim);
  const int at_x = !rotated ? (tensor.rotated > 0 ? rotary : 0) + (item - tensor.rotated) * size
                   : pairs == RopePairs::halves ? item * size
                                                : 2 * item * size;
  const int at_y = !rotated ? at_x : pairs == RopePairs::halves ? at_x + rotary / 2 : at_x + size;
  RawChunk<T> raw_x[heads_each], raw_y[heads_each];
  const std::byte* from = tensor.from + b * tensor.from_b + first * tensor.from_h + s * tensor.from_s;
#pragma unroll
  for (int n = 0; n < heads_each; ++n) {
    if (!inside(n)) continue;
    const auto* head = reinterpret_cast<const T*>(from + n * (tensor.lanes * tensor.from_h));
    raw_x[n].load(head + at_x);
    if (rotated) raw_y[n].load(head + at_y);
  }
  Rotation<T> rotation;
  if (rotated) rotation.load(call, b, call.angle_row(b, s), item);
  const auto store = [&](std::byte* to, std::int64_t step) {
#pragma unroll
    for (int n = 0; n < heads_each; ++n) {
      if (!inside(n)) continue;
      auto* head = reinterpret_cast<T*>(to + n * (tensor.lanes * step));
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
  if (tensor.to != nullptr) {
    store(tensor.to + b * tensor.to_b + first * tensor.to_h + s * tensor.to_s, tensor.to_h);
  }
  if (tensor.to_cache != nullptr) {
    const CacheSlot slot = call.cache_slot(b, s);
    if (!slot.inside) return;
    store(tensor.to_cache + slot.b * tensor.cache_b + first * tensor.cache_h + slot.s * tensor.cache_s,
          tensor.cache_h);
  }
}

/// Pair by pair, for rows of any alignment. Each CTA has one token.
template <typename T>
__global__ void __launch_bounds__(256) elements_kernel(const __grid_constant__ RopeCall call) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const RopeProblem& problem = call.problem;
  const std::int64_t b = blockIdx.x / problem.length, s = blockIdx.x % problem.length;
  const std::int64_t angle_row = call.angle_row(b, s);
  const std::int64_t pairs = problem.rotary_dim / 2;
  const std::int64_t per_row = pairs + problem.dim - problem.rotary_dim;
  const float sign = problem.inverse ? -1.0f : 1.0f;
  const auto angle = [&](const Angles& angles, std::int64_t n) {
    return load_element(angles.at(b, angle_row) + n * static_cast<std::int64_t>(size_of(angles.dtype)),
                        angles.dtype);
  };
  const std::int64_t all = (problem.heads_q + problem.heads_kv) * per_row;
  for (std::int64_t index = threadIdx.x; index < all; index += blockDim.x) {
    const RowPointers row = row_pointers(call, static_cast<int>(index / per_row), b, s);
    const auto* from = reinterpret_cast<const T*>(row.from);
    const auto store = [&](std::int64_t at, T value) {
      if (row.to != nullptr) reinterpret_cast<T*>(row.to)[at] = value;
      if (row.to_cache != nullptr) reinterpret_cast<T*>(row.to_cache)[at] = value;
    };
    const std::int64_t n = index % per_row;
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

RotaryTensor tensor_of(const Rows& from, const Rows& to, const Rows& cache, std::int64_t heads, int rotated,
                       int kept) {
  const auto width = static_cast<std::int64_t>(size_of(from.dtype));
  RotaryTensor tensor{.from = from.data,
                      .from_b = from.stride_b * width,
                      .from_h = from.stride_h * width,
                      .from_s = from.stride_s * width,
                      .heads = static_cast<int>(heads),
                      .rotated = rotated,
                      .kept = kept};
  if (to.wanted) {
    tensor.to = to.data;
    tensor.to_b = to.stride_b * width, tensor.to_h = to.stride_h * width, tensor.to_s = to.stride_s * width;
  }
  if (cache.wanted) {
    tensor.to_cache = cache.data;
    tensor.cache_b = cache.stride_b * width, tensor.cache_h = cache.stride_h * width;
    tensor.cache_s = cache.stride_s * width;
  }
  return tensor;
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
             .early = has_pdl(problem.device)};
  const bool vectorized = problem.aligned && has_aligned_rows(call.cos) && has_aligned_rows(call.sin) &&
                          problem.rotary_dim % (2 * size) == 0 && problem.dim % size == 0 &&
                          problem.dim_v % size == 0 && all_tokens <= 0x7fffffff;
  const auto rotated = static_cast<int>(problem.rotary_dim) / (2 * size);
  const auto kept = static_cast<int>(problem.dim - problem.rotary_dim) / size;
  const auto values = static_cast<int>(problem.dim_v) / size;
  const int most_items = std::max(rotated + kept, values);
  if (!vectorized || most_items > most_threads) return launch<elements_kernel<T>>(how, call);
  RotaryTensors tensors{{tensor_of(call.q, call.out_q, {}, problem.heads_q, rotated, kept),
                         tensor_of(call.k, call.out_k, call.k_cache, problem.heads_kv, rotated, kept),
                         tensor_of(call.v, {}, call.v_cache, values > 0 ? problem.heads_kv : 0, 0, values)}};
  const auto divide = [&](int heads_each) {
    // A CTA's rows should be contiguous as far as possible: if the rows of a head follow each other, it takes
    // many tokens of few heads; if the rows of a token do, all heads of few tokens.
    const bool by_heads =
        call.q.wanted ? call.q.stride_s < call.q.stride_h : call.k.stride_s < call.k.stride_h;
    const std::int64_t heads = std::max(problem.heads_q, problem.heads_kv);
    const std::int64_t lanes = by_heads ? 1 : (heads + heads_each - 1) / heads_each;
    tensors.tokens_log2 = 0;
    while ((most_items * lanes << (tensors.tokens_log2 + 1)) <= most_threads &&
           (1 << tensors.tokens_log2) < problem.length) {
      ++tensors.tokens_log2;
    }
    how.blocks = (all_tokens + (1 << tensors.tokens_log2) - 1) >> tensors.tokens_log2;
    how.layers = 0;
    how.threads = most_threads;
    for (RotaryTensor& tensor : tensors.of) {
      if (tensor.heads == 0) continue;
      const int most_lanes = (tensor.heads + heads_each - 1) / heads_each;
      tensor.lanes = std::min(most_lanes, how.threads / tensor.items() >> tensors.tokens_log2);
      tensor.blocks = (tensor.heads + tensor.lanes * heads_each - 1) / (tensor.lanes * heads_each);
      how.layers += tensor.blocks;
    }
  };
  divide(4);
  const auto launch_with = [&]<int heads_each>() {
    problem.pairs == RopePairs::halves
        ? launch<chunks_kernel<T, RopePairs::halves, heads_each>>(how, call, tensors)
        : launch<chunks_kernel<T, RopePairs::interleaved, heads_each>>(how, call, tensors);
  };
  // With few tokens, as many CTAs as possible divide the work: one head per thread.
  if (how.blocks * how.layers >= 2 * device_properties(problem.device.index).multiprocessors) {
    return launch_with.template operator()<4>();
  }
  divide(1);
  launch_with.template operator()<1>();
}

}  // namespace

void run_rope(const RopeCall& call, const Context& context) {
  with_type(call.problem.dtype, [&]<typename T>() { run_of<T>(call, context); });
}

}  // namespace tilewise::cuda
