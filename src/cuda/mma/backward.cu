#include "cuda/mma/backward.h"

#include <algorithm>

#include "cuda/mma/backward_space.cuh"
#include "cuda/mma/backward_tuning.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/simt/row_gradients.h"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {
namespace {

// What comes before and after the kernel over tiles: a few numbers a query, and results from sums.

constexpr int threads = 256;

// Lanes that share a row of at most `dim` elements, eight each.
template <int lanes_>
struct RowLanes {
  static constexpr int lanes = lanes_;
  int lane = static_cast<int>(threadIdx.x) % lanes;
  std::int64_t row = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / lanes;

  static std::int64_t blocks(std::int64_t rows) { return (rows * lanes + threads - 1) / threads; }
  __device__ static float sum(float x) {
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
  }
};

// Division is slow in 64 bits, and seldom needs them.
struct Parts {
  std::int64_t quotient, rest;

  __device__ Parts(std::int64_t a, std::int64_t b) {
    if (((a | b) >> 32) == 0) {
      quotient = static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
    } else {
      quotient = a / b;
    }
    rest = a - quotient * b;
  }
};

// Row `index` of [heads, rows of the batch]; past the last sequence of packed ones it is nobody's.
struct BatchRow {
  std::int64_t b, h, s;
  bool owned;

  __device__ static BatchRow of_query(const AttentionCall& call, std::int64_t index) {
    const Parts parts(index, call.rows_q());
    BatchRow row{0, parts.quotient, parts.rest, parts.quotient < call.problem.heads_q};
    if (call.packed()) {
      row.owned = row.owned && row.s < call.cumulative_q.at(call.problem.batch);
    } else {
      const Parts entry(row.s, call.problem.length_q);
      row.b = entry.quotient;
      row.s = entry.rest;
    }
    return row;
  }
  __device__ static BatchRow of_key(const AttentionCall& call, std::int64_t index) {
    const Parts parts(index, call.rows_k());
    BatchRow row{0, parts.quotient, parts.rest, parts.quotient < call.problem.heads_kv};
    if (call.packed()) {
      row.owned = row.owned && row.s < call.cumulative_k.at(call.problem.batch);
    } else {
      const Parts entry(row.s, call.problem.length_k);
      row.b = entry.quotient;
      row.s = entry.rest;
      row.owned = row.owned && row.s < call.sequence(row.b).length_k;
    }
    return row;
  }
};

// Eight elements of a row from `first` on, those past its end 0.
template <typename T>
__device__ __forceinline__ void load_eight(float (&to)[8], const std::byte* row, int first, int dims) {
  if (first + 8 <= dims) {
    const uint4 eight = *reinterpret_cast<const uint4*>(row + first * 2);
    const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack<T>(words[n]);
      to[2 * n] = two.x;
      to[2 * n + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      to[n] = first + n < dims ? widen(reinterpret_cast<const T*>(row)[first + n]) : 0.0f;
    }
  }
}

__device__ __forceinline__ float d_lse_of(const AttentionCall& call, const BatchRow& row) {
  return call.d_lse.wanted ? *reinterpret_cast<const float*>(call.d_lse.at(row.b, row.h, row.s)) : 0.0f;
}

// Raises what is largest by the rows of a block. Not a number counts as infinite.
__device__ void raise(int* largest, float value) {
  __shared__ int highest;
  if (threadIdx.x == 0) highest = 0;
  __syncthreads();  // it is 0
  atomicMax(&highest, __float_as_int(value >= 0 ? value : -minus_infinity));
  __syncthreads();  // all were there
  if (threadIdx.x == 0) atomicMax(largest, highest);
}

// What the kernel over tiles needs of each query; clears what it adds to.
template <typename T, int lanes>
__global__ void __launch_bounds__(threads)
    row_values(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  const RowLanes<lanes> at;
  const BatchRow row = BatchRow::of_query(call, at.row);
  const auto dims = static_cast<int>(call.problem.dim_v);
  float product = 0;
  float norm = 0;
  if (row.owned) {
    if (at.lane * 8 < dims) {
      float o[8], d_o[8];
      load_eight<T>(o, row_of_halves(call.o, row.b, row.h, row.s), at.lane * 8, dims);
      load_eight<T>(d_o, row_of_halves(call.d_o, row.b, row.h, row.s), at.lane * 8, dims);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        product = fmaf(o[n], d_o[n], product);
        norm = fmaf(d_o[n], d_o[n], norm);
      }
    }
    if (space.dq != nullptr) {
      auto* dq = reinterpret_cast<float4*>(space.dq + at.row * space.dq_stride);
      for (int n = at.lane; n < space.dq_stride / 4; n += lanes) dq[n] = {};
    }
  }
  product = at.sum(product);
  const float d_lse = row.owned ? d_lse_of(call, row) : 0.0f;
  if (weight_bits<T> > 0) {
    raise(&space.largest->d_o, sqrtf(at.sum(norm)));
    __syncthreads();  // it was read
    raise(&space.largest->d_lse, fabsf(d_lse));
  }
  if (!row.owned || at.lane != 0) return;
  const float lse = *reinterpret_cast<const float*>(call.lse.at(row.b, row.h, row.s));
  const bool unseen = lse == minus_infinity;
  space.rows.top[at.row] = unseen ? -minus_infinity : lse * log2e;
  space.rows.shift[at.row] = unseen ? 0.0f : d_lse - product;
  space.rows.rest[at.row] = 0;
  space.rows.peak_count[at.row] = 0;
}

template <typename T, int lanes>
__global__ void __launch_bounds__(threads)
    value_norms(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  const RowLanes<lanes> at;
  const BatchRow row = BatchRow::of_key(call, at.row);
  const auto dims = static_cast<int>(call.problem.dim_v);
  float norm = 0;
  if (row.owned && at.lane * 8 < dims) {
    float v[8];
    load_eight<T>(v, row_of_halves(call.v, row.b, row.h, row.s), at.lane * 8, dims);
#pragma unroll
    for (int n = 0; n < 8; ++n) norm = fmaf(v[n], v[n], norm);
  }
  raise(&space.largest->v, sqrtf(at.sum(norm)));
}

// dq from its sums, with what a peak adds.
template <typename T, int lanes>
__global__ void __launch_bounds__(threads)
    finish_queries(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  const RowLanes<lanes> at;
  const BatchRow row = BatchRow::of_query(call, at.row);
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const int first = at.lane * 8;
  // Of the sixteen elements of two lanes each has read eight places: two, two of the other's, and again.
  float4 low{}, high{};
  if (row.owned && first < space.dq_stride) {
    const auto* from = reinterpret_cast<const float4*>(space.dq + at.row * space.dq_stride + first);
    low = from[0];
    high = from[1];
  }
  const bool even = at.lane % 2 == 0;
  const float give[4] = {even ? low.z : low.x, even ? low.w : low.y, even ? high.z : high.x,
                         even ? high.w : high.y};
  float got[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) got[n] = __shfl_xor_sync(~0u, give[n], 1);
  if (!row.owned || first >= dims) return;
  float sum[8] = {even ? low.x : got[0],  even ? low.y : got[1], even ? high.x : got[2],
                  even ? high.y : got[3], even ? got[0] : low.z, even ? got[1] : low.w,
                  even ? got[2] : high.z, even ? got[3] : high.w};
  const GradientScale scale = gradient_scale<T>(space.largest);
  if (space.rows.peak_count[at.row] > 0) {
    const Mended mended(space.rows, at.row, d_lse_of(call, row), scale);
#pragma unroll
    for (int f = 0; f < most_peaks; ++f) {
      if (f >= mended.count) continue;
      float k[8];
      load_eight<T>(k, row_of_halves(call.k, row.b, call.key_head(row.h), mended.key[f]), first, dims);
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[n] = fmaf(mended.gradient[f], k[n], sum[n]);
    }
  }
  const float factor = static_cast<float>(call.scale) * scale.down;
  const uint4 eight{pack<T>(sum[0] * factor, sum[1] * factor), pack<T>(sum[2] * factor, sum[3] * factor),
                    pack<T>(sum[4] * factor, sum[5] * factor), pack<T>(sum[6] * factor, sum[7] * factor)};
  store_eight(row_of_halves(call.dq, row.b, row.h, row.s), first, dims, true, eight);
}

// A lane's share of a row of dk that grows as long as queries point at the same key, which they often do.
template <int lane_dims>
struct KeySum {
  float* dk = nullptr;  // the row's sums
  int dims;
  float sum[lane_dims] = {};

  __device__ void add(float* to, float factor, const float (&q)[lane_dims]) {
    if (to != dk) flush();
    dk = to;
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) sum[n] = fmaf(factor, q[n], sum[n]);
  }
  __device__ void flush() {
    if (dk == nullptr) return;
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      const int d = static_cast<int>(threadIdx.x) % 32 + 32 * n;
      if (d < dims) atomicAdd(dk + d, sum[n]);
      sum[n] = 0;
    }
  }
};

// Adds to dk's sums what peaks add. A warp has 32 queries: a lane each for the numbers, then all lanes for
// the vectors of one after another.
template <typename T>
__global__ void __launch_bounds__(threads)
    mend_keys(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  constexpr int lane_dims = 8;  // 32 apart
  const std::int64_t index = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const BatchRow own = BatchRow::of_query(call, index);
  Mended mended;
  if (own.owned && space.rows.peak_count[index] > 0) {
    mended = Mended(space.rows, index, d_lse_of(call, own), gradient_scale<T>(space.largest));
  }
  const auto dims = static_cast<int>(call.problem.dim_qk);
  KeySum<lane_dims> dk{.dims = dims};
#pragma unroll
  for (int f = 0; f < most_peaks; ++f) {
    for (unsigned left = __ballot_sync(~0u, f < mended.count); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      const BatchRow row = BatchRow::of_query(call, index - static_cast<int>(threadIdx.x) % 32 + from);
      const std::int64_t key = __shfl_sync(~0u, mended.key[f], from);
      const float gradient = __shfl_sync(~0u, mended.gradient[f], from);
      const auto* q_row = reinterpret_cast<const T*>(row_of_halves(call.q, row.b, row.h, row.s));
      float q[lane_dims];
#pragma unroll
      for (int n = 0; n < lane_dims; ++n) {
        const int d = static_cast<int>(threadIdx.x) % 32 + 32 * n;
        q[n] = d < dims ? widen(q_row[d]) : 0.0f;
      }
      dk.add(space.dk + space.key_row(call, row.b, call.key_head(row.h), key) * dims, gradient, q);
    }
  }
  dk.flush();
}

// Rows of dk that had a peak, from their sums. A warp has 32 keys.
template <typename T>
__global__ void __launch_bounds__(threads)
    finish_keys(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardSpace space) {
  const std::int64_t index = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const BatchRow own = BatchRow::of_key(call, index);
  unsigned left = __ballot_sync(~0u, own.owned && space.key_has_peak[index] != 0);
  if (left == 0) return;
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const float factor = static_cast<float>(call.scale) * gradient_scale<T>(space.largest).down;
  for (; left != 0; left &= left - 1) {
    const std::int64_t from = index - static_cast<int>(threadIdx.x) % 32 + __ffs(static_cast<int>(left)) - 1;
    const BatchRow row = BatchRow::of_key(call, from);
    auto* to = reinterpret_cast<T*>(row_of_halves(call.dk, row.b, row.h, row.s));
    for (int d = static_cast<int>(threadIdx.x) % 32; d < dims; d += 32) {
      to[d] = narrow<T>(space.dk[from * dims + d] * factor);
    }
  }
}

/// What the kernel over tiles needs.
template <typename T, int lanes>
void prepare(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  if (weight_bits<T> > 0) {
    check_cuda(cudaMemsetAsync(space.largest, 0, sizeof(Largest), stream), "tilewise mma backward");
    launch<value_norms<T, lanes>>({.name = "tilewise mma backward, norms",
                                   .blocks = RowLanes<lanes>::blocks(call.problem.heads_kv * call.rows_k()),
                                   .threads = threads,
                                   .stream = stream},
                                  call, space);
  }
  launch<row_values<T, lanes>>({.name = "tilewise mma backward, rows",
                                .blocks = RowLanes<lanes>::blocks(call.problem.heads_q * call.rows_q()),
                                .threads = threads,
                                .stream = stream},
                               call, space);
}

/// What is left after it.
template <typename T, int lanes>
void finish(const AttentionCall& call, const BackwardSpace& space, cudaStream_t stream) {
  const std::int64_t queries = call.problem.heads_q * call.rows_q();
  const std::int64_t keys = call.problem.heads_kv * call.rows_k();
  if (call.dq.wanted) {
    launch<finish_queries<T, lanes>>({.name = "tilewise mma backward, dq",
                                      .blocks = RowLanes<lanes>::blocks(queries),
                                      .threads = threads,
                                      .stream = stream},
                                     call, space);
  }
  if (!call.dk.wanted) return;
  launch<mend_keys<T>>({.name = "tilewise mma backward, peaks",
                        .blocks = (queries + threads - 1) / threads,
                        .threads = threads,
                        .stream = stream},
                       call, space);
  launch<finish_keys<T>>({.name = "tilewise mma backward, dk",
                          .blocks = (keys + threads - 1) / threads,
                          .threads = threads,
                          .stream = stream},
                         call, space);
}

// Calls one of the two with the call's type and as many lanes as its rows need.
template <typename Body>
void with_lanes(const AttentionCall& call, const Body& body) {
  const std::int64_t dim = std::max(call.problem.dim_qk, call.problem.dim_v);
  const auto of_type = [&]<typename T>(const T*) {
    if (dim <= 64) return body.template operator()<T, 8>();
    if (dim <= 128) return body.template operator()<T, 16>();
    body.template operator()<T, 32>();
  };
  call.problem.dtype == DType::f16 ? of_type(static_cast<const __half*>(nullptr))
                                   : of_type(static_cast<const __nv_bfloat16*>(nullptr));
}

}  // namespace

std::size_t backward_workspace(const AttentionCall& call) { return BackwardSpace(call, nullptr).bytes; }

std::size_t backward_shared_bytes(std::int64_t dim) {
  std::size_t least = 0;
  for (const BackwardConfig& c : PlainBackward::rows) {
    if (c.dim >= dim && (least == 0 || c.shared_bytes() < least)) least = c.shared_bytes();
  }
  return least;
}

void prepare_backward(const AttentionCall& call, const Context& context) {
  const BackwardSpace space(call, context.workspace.data);
  with_lanes(call, [&]<typename T, int lanes>() {
    prepare<T, lanes>(call, space, static_cast<cudaStream_t>(context.stream));
  });
}

void finish_backward(const AttentionCall& call, const Context& context) {
  const BackwardSpace space(call, context.workspace.data);
  with_lanes(call, [&]<typename T, int lanes>() {
    finish<T, lanes>(call, space, static_cast<cudaStream_t>(context.stream));
  });
  simt::clear_unused_gradients(call, static_cast<cudaStream_t>(context.stream));
}

void backward(const AttentionCall& call, const Context& context) {
  const BackwardSpace space(call, context.workspace.data);
  prepare_backward(call, context);
  call.problem.dtype == DType::f16 ? plain_backward_of<__half>(call, space, context)
                                   : plain_backward_of<__nv_bfloat16>(call, space, context);
  finish_backward(call, context);
}

}  // namespace tilewise::cuda::mma
