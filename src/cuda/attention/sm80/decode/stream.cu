#include "cuda/attention/sm80/decode/stream.h"

#include <limits>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/forward/softmax.cuh"
#include "cuda/attention/sm80/forward/split_kv.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/runtime/early.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// Decoding, which is bound by reading K and V once. They go straight into registers, 16 bytes per lane,
// already as fragments: the order of dims does not matter in Q·Kᵀ if Q has the same one, and columns of O may
// be computed in any order. A warp loads its next keys while it computes P, and its next values after it has
// added these. No warp waits for another before the end.
//
// Rows are the queries of all heads that share the keys, eight at most. P is kept exact by a second product
// with its rounding errors, and products of 16 dims are summed in f32: tensor cores have little else to do.

/// Those of a step's 16 keys that are read: [first, last).
struct StepKeys {
  int first, last;
};

/// What a lane has loaded of K and V, with its part of O and of the softmax's sums; g = lane / 4, t = lane
/// % 4.
template <typename T, int dim>
struct KeyStream {
  static constexpr int key_chunks = dim / 32;    ///< of 16 bytes: dims from 32n + 8t on
  static constexpr int value_chunks = dim / 64;  ///< of 16 bytes: dims from 64n + 8g on
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  uint4 k[2][key_chunks];    ///< of keys g and g + 8
  uint4 v[4][value_chunks];  ///< of keys 2t, 2t + 1, 2t + 8 and 2t + 9
  /// Rows 2t and 2t + 1 of dim 64n + 8g + 2j, then the same rows of the next dim.
  float o[value_chunks][4][4] = {};
  float maximum = lowest;  ///< of row g: what its P is relative to
  float sum = 0;           ///< of the lane's own P of row g

  static __device__ __forceinline__ uint4 chunk(const std::byte* from, int key, const StepKeys& present) {
    return key >= present.first && key < present.last ? __ldcs(reinterpret_cast<const uint4*>(from))
                                                      : uint4{};
  }
  /// Loads the keys of a step, which are `stride` bytes apart; 0 for those that are not present.
  __device__ __forceinline__ void load_keys(const std::byte* first, std::int64_t stride,
                                            const StepKeys& present) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* row = first + (g + 8 * half) * stride + t * 16;
#pragma unroll
      for (int n = 0; n < key_chunks; ++n) k[half][n] = chunk(row + n * 64, g + 8 * half, present);
    }
  }
  __device__ __forceinline__ void load_values(const std::byte* first, std::int64_t stride,
                                              const StepKeys& present) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int key = 2 * t + r % 2 + r / 2 * 8;
      const std::byte* row = first + key * stride + g * 16;
#pragma unroll
      for (int n = 0; n < value_chunks; ++n) v[r][n] = chunk(row + n * 128, key, present);
    }
  }

  /// Products of row g with keys 2t, 2t + 1, 2t + 8 and 2t + 9. `q_smem` has the lane's fragments of Q.
  __device__ __forceinline__ void multiply_keys(float (&s)[4], const uint4* q_smem) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0;
#pragma unroll
    for (int n = 0; n < 2 * key_chunks; ++n) {
      const uint4 fragment = q_smem[n * 32];
      const std::uint32_t q[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& own = k[half][n / 2];
        float products[4] = {};
        multiply_matrices<T>(products, q, n % 2 == 0 ? own.x : own.z, n % 2 == 0 ? own.y : own.w);
        s[2 * half] += products[0];
        s[2 * half + 1] += products[1];
      }
    }
  }

  /// Turns scores, in natural units, into P. The maximum is raised only when it is 2^8 too low.
  __device__ __forceinline__ void exponentiate(float (&s)[4]) {
    constexpr float slack = 8 / log2e;
    const float highest = row_maximum(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])));
    if (__any_sync(~0u, highest > maximum + slack)) {
      const float raised = fmaxf(maximum, highest);
      const float rescale = exp2_approx((maximum - raised) * log2e);
      maximum = raised;
      sum *= rescale;
      const float of_two[2] = {of_row(rescale, 0), of_row(rescale, 1)};
#pragma unroll
      for (int n = 0; n < value_chunks; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][j][e] *= of_two[e % 2];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = exp2_approx((s[e] - maximum) * log2e);
      sum += s[e];
    }
  }

  __device__ __forceinline__ void add_values(const float (&p)[4]) {
    std::uint32_t rounded[2], errors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rounded[half] = pack<T>(p[2 * half], p[2 * half + 1]);
      const float2 kept = unpack<T>(rounded[half]);
      errors[half] = pack<T>(p[2 * half] - kept.x, p[2 * half + 1] - kept.y);
    }
#pragma unroll
    for (int n = 0; n < value_chunks; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Operand A is Vᵀ: dims 2j and 2j + 1 of the lane's eight are rows g and g + 8, and neighbouring keys
        // share a register.
        const std::uint32_t dims[4] = {__byte_perm(word(v[0][n], j), word(v[1][n], j), 0x5410),
                                       __byte_perm(word(v[0][n], j), word(v[1][n], j), 0x7632),
                                       __byte_perm(word(v[2][n], j), word(v[3][n], j), 0x5410),
                                       __byte_perm(word(v[2][n], j), word(v[3][n], j), 0x7632)};
        multiply_matrices<T>(o[n][j], dims, errors[0], errors[1]);
        multiply_matrices<T>(o[n][j], dims, rounded[0], rounded[1]);
      }
    }
  }

  /// The value of x in a lane of row 2t, or of the row after it.
  __device__ __forceinline__ float of_row(float x, int after) const {
    return __shfl_sync(~0u, x, 8 * t + 4 * after);
  }

 private:
  static __device__ __forceinline__ std::uint32_t word(const uint4& four, int n) {
    return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
  }
};

/// Walks over the keys of the CTA's split, in steps of a warp.
template <bool paged>
struct StreamKeys {
  const AttentionCall& call;
  const std::uint32_t b;
  const std::byte *k,
      *v;           ///< of the head, from the sequence's first key on, or from the pool's first page on
  int first, last;  ///< the keys that some query of the CTA sees, up to the split's end
  int step;         ///< the first of the warp's next 16 keys; some may lie outside [first, last)

  __device__ StreamKeys(const AttentionCall& call_, const QueryRows& rows, int split, int splits)
      : call(call_), b(static_cast<std::uint32_t>(rows.queries.b)) {
    const Sequence& sequence = rows.queries.sequence;
    k = call.k.data + (paged ? 0 : row_offset(call.k, sequence)) + rows.head_kv * call.k.stride_h * 2;
    v = call.v.data + (paged ? 0 : row_offset(call.v, sequence)) + rows.head_kv * call.v.stride_h * 2;
    constexpr int keys = StreamShape::keys;
    const KeyRange range = rows.queries.any(call);
    const auto begin = static_cast<int>(range.first) / keys * keys;
    const auto end = static_cast<int>(range.last);
    const int share = end > begin ? ((end - begin + keys - 1) / keys + splits - 1) / splits * keys : 0;
    step = begin + split * share + static_cast<int>(threadIdx.x) / 32 * keys;
    first = static_cast<int>(range.first);
    last = min(end, begin + (split + 1) * share);
  }
  __device__ bool more() const { return step < last; }
  __device__ void advance() { step += StreamShape::keys * StreamShape::warps; }
  __device__ StepKeys present() const { return {first - step, last - step}; }
  /// The page of the warp's next keys.
  __device__ std::int32_t page() const {
    if constexpr (!paged) return 0;
    const std::uint32_t slot = static_cast<std::uint32_t>(step) / static_cast<std::uint32_t>(call.page);
    return static_cast<std::int32_t>(call.page_at(b, slot));
  }
  __device__ const std::byte* row(const std::byte* head, const Rows& rows, std::int32_t page_) const {
    if constexpr (!paged) return head + step * (rows.stride_s * 2);
    const std::uint32_t inside = static_cast<std::uint32_t>(step) % static_cast<std::uint32_t>(call.page);
    return head + (page_ * rows.stride_b + inside * rows.stride_s) * 2;
  }

 private:
  __device__ std::int64_t row_offset(const Rows& rows, const Sequence& sequence) const {
    return (b * rows.stride_b + sequence.first_k * rows.stride_s) * 2;
  }
};

/// A CTA's shared memory: its queries, and the results of its warps, which are joined at the end.
template <int dim>
struct StreamMemory {
  uint4 q[dim / 16][32];  ///< fragments of 16 dims, whose lower eight rows are 0
  float maximum[StreamShape::warps][StreamShape::rows];
  float sum[StreamShape::warps][StreamShape::rows];
  float o[StreamShape::warps][StreamShape::rows][dim];
  int first[StreamShape::rows], last[StreamShape::rows];  ///< the keys that a row sees
};

template <typename T, int dim>
__device__ __forceinline__ void finish_stream(const AttentionCall& call, const QueryRows& rows,
                                              const Splits& splits, StreamMemory<dim>& shared,
                                              KeyStream<T, dim>& stream) {
  constexpr int warps = StreamShape::warps;
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const float sum = row_sum(stream.sum);
  if (stream.t == 0) {
    shared.maximum[warp][stream.g] = stream.maximum;
    shared.sum[warp][stream.g] = sum;
  }
  __syncthreads();  // the maxima and sums of all warps are there
  const auto highest_of = [&](int r) {
    float highest = shared.maximum[0][r];
#pragma unroll
    for (int w = 1; w < warps; ++w) highest = fmaxf(highest, shared.maximum[w][r]);
    return highest;
  };
  const auto factor_of = [&](float own, float highest) { return exp2f((own - highest) * log2e); };
  const float factor = factor_of(stream.maximum, highest_of(stream.g));
#pragma unroll
  for (int after = 0; after < 2; ++after) {
    const int r = 2 * stream.t + after;
    const float of_row = stream.of_row(factor, after);
    if (r >= rows.count()) continue;
#pragma unroll
    for (int n = 0; n < dim / 64; ++n) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        *reinterpret_cast<float4*>(&shared.o[warp][r][64 * n + 8 * stream.g + 2 * j]) = {
            stream.o[n][j][after] * of_row, stream.o[n][j][2 + after] * of_row,
            stream.o[n][j + 1][after] * of_row, stream.o[n][j + 1][2 + after] * of_row};
      }
    }
  }
  __syncthreads();  // O of all warps is there

  const auto split = static_cast<int>(blockIdx.y);
#pragma unroll 1
  for (int index = thread; index < rows.count() * (dim / 4); index += StreamShape::threads) {
    const int r = index / (dim / 4), d = index % (dim / 4) * 4;
    float maximum = highest_of(r), total = 0;
    float4 o{};
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      total += shared.sum[w][r] * factor_of(shared.maximum[w][r], maximum);
      const float4 more = *reinterpret_cast<const float4*>(&shared.o[w][r][d]);
      o = {o.x + more.x, o.y + more.y, o.z + more.z, o.w + more.w};
    }
    const std::int64_t row = Splits::row(call, rows.queries.b, rows.head(r), rows.query(r));
    if (splits.count > 1) {
      *reinterpret_cast<float4*>(splits.o(split, row) + d) = o;
      if (d == 0) {
        float* state = splits.state(split, row);
        state[0] = maximum;
        state[1] = state[2] = total;
      }
      continue;
    }
    float factor = 1;
    if (call.problem.features.sinks) {
      const auto sink = static_cast<float>(call.sinks.at(rows.queries.b, rows.head(r)));
      float sink_p;
      factor = join_sink(sink, maximum, sink_p);
      total = total * factor + sink_p;
    }
    if (call.lse.wanted && d == 0) {
      *rows.float_of(call.lse, r) = total == 0 ? minus_infinity : maximum + logf(total);
    }
    const float inverse = total == 0 ? 0.0f : factor / total;
    store_4(reinterpret_cast<T*>(rows.row_of(call.o, r)) + d,
            {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse});
  }
}

/// Prefetches the first K and V of the split into the L2 while the previous kernel still runs. If that kernel
/// writes them, the L2 gets its results. Lengths may be out of date, and they are read past the L1, which
/// would keep the old ones.
template <int dim>
__device__ __forceinline__ void prefetch_split(const AttentionCall& call, std::uint32_t b,
                                               std::uint32_t head_kv, int split, int splits) {
  if (call.problem.layout != Layout::dense) return;
  auto length = static_cast<int>(call.problem.length_k);
  if (call.key_lengths.data != nullptr) {
    length = max(0, min(length, __ldcg(call.key_lengths.data + b * call.key_lengths.stride[0])));
  }
  const int share = (length + splits - 1) / splits;
  const int key = split * share + static_cast<int>(threadIdx.x);
  if (key >= min(length, (split + 1) * share)) return;
  prefetch_l2(call.k.at(b, head_kv, key), dim * 2);
  prefetch_l2(call.v.at(b, head_kv, key), dim * 2);
}

template <typename T, int dim, bool paged>
__global__ void __launch_bounds__(StreamShape::threads, StreamShape::blocks(dim))
    stream_kernel(const __grid_constant__ AttentionCall call, const int heads, const int inverse,
                  const Splits splits) {
#if __CUDA_ARCH__ >= 800
  __shared__ __align__(16) StreamMemory<dim> shared;
  let_next_kernel_start();
  const auto heads_kv = static_cast<std::uint32_t>(call.problem.heads_kv);
  const std::uint32_t b = blockIdx.x / heads_kv, head_kv = blockIdx.x % heads_kv;
  if constexpr (!paged) prefetch_split<dim>(call, b, head_kv, static_cast<int>(blockIdx.y), splits.count);
  wait_for_previous_kernel();  // it may have written Q, K, V, lengths or pages
  const Sequence sequence = call.sequence(b);
  const QueryRows rows{{.b = b,
                        .h = static_cast<std::int64_t>(head_kv) * heads,
                        .first = 0,
                        .count = static_cast<int>(sequence.length_q),
                        .sequence = sequence},
                       static_cast<int>(head_kv),
                       heads,
                       inverse};
  if (rows.count() <= 0) return;
  StreamKeys<paged> keys(call, rows, static_cast<int>(blockIdx.y), splits.count);
  KeyStream<T, dim> stream;
  if (keys.more()) {
    const std::int32_t page = keys.page();
    stream.load_keys(keys.row(keys.k, call.k, page), call.k.stride_s * 2, keys.present());
    stream.load_values(keys.row(keys.v, call.v, page), call.v.stride_s * 2, keys.present());
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = min(stream.g, rows.count() - 1);
  const std::byte* query = rows.row_of(call.q, row) + stream.t * 16;
  for (int n = static_cast<int>(threadIdx.x) / 32; n < dim / 32; n += StreamShape::warps) {
    const uint4 own = *reinterpret_cast<const uint4*>(query + n * 64);
    shared.q[2 * n][lane] = uint4{own.x, 0, own.y, 0};
    shared.q[2 * n + 1][lane] = uint4{own.z, 0, own.w, 0};
  }
  const KeyRange seen = call.keys_of(sequence, rows.query(row));
  if (threadIdx.x < 32 && stream.t == 0) {
    shared.first[stream.g] = static_cast<int>(seen.first);
    shared.last[stream.g] = static_cast<int>(seen.last);
  }
  const KeyRange all = rows.queries.all(call);
  const auto all_first = static_cast<int>(all.first);
  const auto all_last = min(static_cast<int>(all.last), keys.last) - StreamShape::keys;
  const auto scale = static_cast<float>(call.scale);
  __syncthreads();  // the queries are in shared memory

#pragma unroll 1
  while (keys.more()) {
    const int first = keys.step;
    keys.advance();
    const bool more = keys.more();
    const std::int32_t page = more ? keys.page() : 0;
    float s[4];
    stream.multiply_keys(s, &shared.q[0][lane]);
    if (more) stream.load_keys(keys.row(keys.k, call.k, page), call.k.stride_s * 2, keys.present());
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] *= scale;
    if (first < all_first || first > all_last) {
      const int own_first = shared.first[stream.g], own_last = min(shared.last[stream.g], keys.last);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + 2 * stream.t + e % 2 + e / 2 * 8;
        if (key < own_first || key >= own_last) s[e] = minus_infinity;
      }
    }
    stream.exponentiate(s);
    stream.add_values(s);
    if (more) stream.load_values(keys.row(keys.v, call.v, page), call.v.stride_s * 2, keys.present());
  }
  finish_stream<T, dim>(call, rows, splits, shared, stream);
#endif
}

namespace {

template <typename T, int dim, bool paged>
void run(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  const auto heads = static_cast<int>(call.group());
  launch<stream_kernel<T, dim, paged>>({.name = "tilewise mma forward, a stream of keys",
                                        .blocks = call.problem.batch * call.problem.heads_kv,
                                        .threads = StreamShape::threads,
                                        .layers = splits.count,
                                        .stream = stream,
                                        .early = has_pdl(call.problem.device)},
                                       call, heads, (65536 + heads - 1) / heads, splits);
}

template <typename T, bool paged>
void run_dim(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  call.problem.dim_v == 64 ? run<T, 64, paged>(call, splits, stream)
                           : run<T, 128, paged>(call, splits, stream);
}
template <typename T>
void run_layout(const AttentionCall& call, const Splits& splits, cudaStream_t stream) {
  call.problem.layout == Layout::paged ? run_dim<T, true>(call, splits, stream)
                                       : run_dim<T, false>(call, splits, stream);
}

}  // namespace

bool suits_stream(const AttentionCall& call, const DeviceProperties& device) {
  const AttentionProblem& problem = call.problem;
  // On an H200 with 4096 keys, 512 heads took 257 µs here and 244 µs in the larger tiles of the forward
  // kernel; 128 heads took 73 µs in both.
  if (problem.batch * problem.heads_kv > 2 * device.multiprocessors) return false;
  return !problem.piece.wide_rows && problem.length_q * call.group() <= StreamShape::rows &&
         problem.dim_qk == problem.dim_v && (problem.dim_v == 64 || problem.dim_v == 128) &&
         !problem.features.needs_more_than_band() &&
         (problem.layout != Layout::paged || call.page % StreamShape::keys == 0) && aligned_chunks(call.q) &&
         aligned_chunks(call.k) && aligned_chunks(call.v) && aligned_chunks(call.o);
}

// The count with the least time, by a model in which CTAs run in rounds and each takes the time of its keys
// and of 64 more.
namespace {

int split_count(const AttentionCall& call, int multiprocessors) {
  constexpr std::int64_t constant_keys = 64;
  constexpr std::int64_t least_keys = 128;
  const std::int64_t heads = call.problem.batch * call.problem.heads_kv;
  const std::int64_t room = std::int64_t{multiprocessors} * StreamShape::blocks(call.problem.dim_v);
  const std::int64_t keys = call.problem.length_k;
  const auto most = static_cast<int>(std::clamp<std::int64_t>(keys / least_keys, 1, most_splits));
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  int chosen = 1;
  for (int count = 1; count <= most; ++count) {
    const std::int64_t rounds = (heads * count + room - 1) / room;
    const std::int64_t time = rounds * ((keys + count - 1) / count + constant_keys);
    if (time < least) {
      least = time;
      chosen = count;
    }
    if (heads * count > 8 * room) break;
  }
  return chosen;
}

}  // namespace

Splits stream_splits(const AttentionCall& call, int multiprocessors, void* space) {
  const int count =
      choosing_by(call, [&](const AttentionCall& asked) { return split_count(asked, multiprocessors); });
  return Splits::of(call, count, space);
}

void stream_forward(const AttentionCall& call, const Context& context) {
  const int multiprocessors = device_properties(context.device.index).multiprocessors;
  const Splits splits = stream_splits(call, multiprocessors, context.workspace.data);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  call.problem.dtype == DType::f16 ? run_layout<__half>(call, splits, stream)
                                   : run_layout<__nv_bfloat16>(call, splits, stream);
  if (splits.count > 1) combine_splits(call, splits, context.stream);
}

}  // namespace tilewise::cuda::mma
