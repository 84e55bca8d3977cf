#include "cuda/simt/fused_short.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cuda/ptx/async_copy.cuh"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/score.cuh"

namespace tilewise::cuda::simt {
namespace {

// Attention over so few keys that a block has the scores of all of them at once, in registers: 8 x 8 a lane
// in both products, where fused_forward.cu, which keeps o beside them, has room for 8 x 4 in the first. Such
// problems have a single round of blocks, so all that a block does before and after its products counts: keys
// and queries come in short pieces of D, of which the first is all that is awaited; addresses are made of few
// numbers (ShortCall); values are copied while scores are multiplied; and all warps write results.
//
// In the first product a warp has half of the queries and a quarter of the keys. It makes weights of them by
// the maximum of its own quarter. In the second it has half of the queries, half of the dims and two quarters
// of the keys, each of which is summed by itself and weighed when it is added.

constexpr int queries = ShortTile::queries;
constexpr int most_keys = 256;
constexpr int dim = ShortTile::dim;
constexpr int warps = 8;
constexpr int threads = warps * 32;
constexpr int M = 8;  // queries of a lane
constexpr int N = 8;  // its keys, then its dims
constexpr int piece = 16;
constexpr int side_queries = queries / 2;
constexpr int quarter_keys = most_keys / 4;
constexpr int group_keys = most_keys / 2;

using Queries = TurnedInFours<queries, 4>;  // [piece, queries], and weights, [keys, queries]
using Keys = TurnedInFours<most_keys, 8>;   // [piece, keys]
using Values = Turned<dim, 8>;              // [keys, dim]

// Floats in shared memory. Each group of warps has its values, the last of which lie where a piece of keys and
// queries was.
constexpr int k_floats = Keys::offset(piece);
constexpr int place_floats = k_floats + Queries::offset(piece);
constexpr int last_values = 16;
constexpr int place_at = (group_keys - last_values) * dim;
constexpr int group_floats = place_at + place_floats;
constexpr int p_at = 2 * group_floats;
constexpr int maxima_at = p_at + Queries::offset(most_keys);  // [quarter, queries]
constexpr int sums_at = maxima_at + 4 * queries;              // [quarter, queries]
constexpr int all_floats = sums_at + 4 * queries;
constexpr int exchange_at = p_at;  // half of all lanes' results, when the weights are done with
static_assert(last_values * dim <= place_floats);
static_assert(threads * M * N / 2 <= Queries::offset(most_keys));
constexpr std::size_t shared_bytes = sizeof(float) * all_floats;

constexpr float lowest = -3.402823466e38f;  // finite: a row that saw nothing needs no special case

/// Rows of an entry and head, in floats.
struct ShortRows {
  float* data;
  std::int64_t stride_b, stride_h;
  int stride_s;

  static ShortRows of(const Rows& rows) {
    return {rows.wanted ? reinterpret_cast<float*>(rows.data) : nullptr, rows.stride_b, rows.stride_h,
            static_cast<int>(rows.stride_s)};
  }
  /// Whether 32 bits are enough for the rows that a block reads or writes.
  static bool holds(const Rows& rows) { return std::abs(rows.stride_s) < (1 << 22); }
  __device__ float* at(std::uint32_t b, std::uint32_t h, int row) const {
    return data + b * stride_b + h * stride_h + static_cast<std::int64_t>(row) * stride_s;
  }
};

/// A call in as few numbers as it takes: the constant cache is cold when a kernel begins, and each line
/// waits.
struct ShortCall {
  ShortRows q, k, v, o, lse;
  std::uint32_t heads, heads_together;
  int length_q, length_k, dim_qk, dim_v;
  int left, right;    // query i sees keys i − left up to i + right
  float scale, unit;  // of products, in natural units and for exp2; both positive
  float sign;         // goes to the queries
};

/// What a block works on.
struct Work {
  std::uint32_t b, h, key_head;
  int first_query, query_count, first_key, key_count;

  __device__ explicit Work(const ShortCall& call) {
    b = blockIdx.y / call.heads;
    h = blockIdx.y - b * call.heads;
    key_head = h / call.heads_together;
    first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * queries;  // the last see the most keys
    query_count = min(queries, call.length_q - first_query);
    first_key = min(max(0, first_query - call.left), call.length_k - 1);
    key_count = max(0, min(call.length_k, first_query + query_count + call.right) - first_key);
  }
};

/// Where a thread stands.
struct Place {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // the same to the compiler, too
  Lanes<4> lane;
  int side = warp % 2;      // of the queries
  int quarter = warp / 2;   // of the keys, in the first product
  int half = warp / 2 % 2;  // of the dims, in the second
  int group = warp / 4;     // there: of the keys

  __device__ int query(int m) const { return side * side_queries + in_runs<4>(lane.row, m); }
  __device__ int key(int n) const { return quarter * quarter_keys + in_runs<8>(lane.column, n); }
  __device__ int dim_of(int n) const { return half * (dim / 2) + in_runs<8>(lane.column, n); }
};

/// Queries and keys on their way: four dims of some rows a thread. A warp reads 64 bytes of eight rows and
/// writes, turned, to as many banks as it has lanes. Rows past the last are the last again; what comes of them
/// is hidden, or not written.
class Pieces {
 public:
  __device__ Pieces(const ShortCall& call, const Work& work, float* shared)
      : k_gmem_(call.k.at(work.b, work.key_head, work.first_key)),
        dim_qk_(call.dim_qk),
        column_(static_cast<int>(threadIdx.x) % 4 * 4),
        row_(static_cast<int>(threadIdx.x) / 4),
        sign_(call.sign),
        shared_(shared) {
    q_gmem_ = call.q.at(work.b, work.h, work.first_query + min(row_, work.query_count - 1));
#pragma unroll
    for (int n = 0; n < steps; ++n) {
      k_offset_[n] = min(row_ + n * rows, max(0, work.key_count - 1)) * call.k.stride_s;
    }
  }

  __device__ int count() const { return (dim_qk_ + piece - 1) / piece; }
  /// Where a piece is: keys, then queries.
  __device__ const float* at(int index) const { return place_of(index); }

  __device__ void fetch(int index) {
    const int first = index * piece + column_;
    if (first < dim_qk_) {
      q_ = __ldg(reinterpret_cast<const float4*>(q_gmem_ + first));
#pragma unroll
      for (int n = 0; n < steps; ++n) {
        k_[n] = __ldg(reinterpret_cast<const float4*>(k_gmem_ + k_offset_[n] + first));
      }
    } else {
      q_ = {};
#pragma unroll
      for (int n = 0; n < steps; ++n) k_[n] = {};
    }
  }
  __device__ void put(int index) const {
    float* k_smem = place_of(index) + Keys::offset(column_) + row_;
    float* q_smem = place_of(index) + k_floats + Queries::offset(column_) + row_;
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      q_smem[Queries::offset(d)] = element(q_, d) * sign_;
#pragma unroll
      for (int n = 0; n < steps; ++n) k_smem[Keys::offset(d) + n * rows] = element(k_[n], d);
    }
  }

 private:
  static constexpr int rows = threads / 4;  // that all threads have at a time
  static constexpr int steps = most_keys / rows;
  static_assert(queries == rows);

  __device__ float* place_of(int index) const { return shared_ + index % 2 * group_floats + place_at; }

  const float *q_gmem_, *k_gmem_;
  int k_offset_[steps];
  int dim_qk_, column_, row_;
  float sign_;
  float* shared_;
  float4 q_, k_[steps];
};

/// The n-th sixteen values of each group, a warp a row.
__device__ __forceinline__ void copy_values(const ShortCall& call, const Work& work, int n, float* shared) {
  const int column = static_cast<int>(threadIdx.x) % 32 * 4;
  const float* v_gmem = call.v.at(work.b, work.key_head, work.first_key);
#pragma unroll
  for (int step = 0; step < 16; step += warps) {
    const int row = n * 16 + step + static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int key = group * group_keys + row;
      const bool present = key < work.key_count && column < call.dim_v;
      copy_async_16(shared + group * group_floats + row * dim + column,
                    present ? v_gmem + key * call.v.stride_s + column : v_gmem, present);
    }
  }
}

// Hides what the band and the end of the keys hide.
__device__ __forceinline__ void hide(const ShortCall& call, const Work& work, const Place& place,
                                     float (&s)[M][N]) {
  const int first_query = work.first_query - work.first_key + place.side * side_queries;
  const int first_key = place.quarter * quarter_keys;
  const int last_key = first_key + quarter_keys - 1;
  if (last_key < work.key_count && last_key <= first_query + call.right &&
      first_key >= first_query + side_queries - 1 - call.left) {
    return;
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int i = work.first_query - work.first_key + place.query(m);
    const int first = i - call.left - place.key(0);
    const int last = min(i + call.right + 1, work.key_count) - place.key(0);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (in_runs<8>(0, n) < first || in_runs<8>(0, n) >= last) s[m][n] = minus_infinity;
    }
  }
}

// Scores to weights, in shared memory, by the maxima of rows over all quarters.
__device__ __forceinline__ void softmax(const ShortCall& call, const Place& place, float (&s)[M][N],
                                        float* shared) {
  const auto over_row = [](float (&x)[M], const auto& join) {
#pragma unroll
    for (int apart = Lanes<4>::apart; apart < 8 * Lanes<4>::apart; apart *= 2) {
#pragma unroll
      for (int m = 0; m < M; ++m) x[m] = join(x[m], __shfl_xor_sync(~0u, x[m], apart));
    }
  };
  const auto store_row = [&](const float (&x)[M], float* to) {
    if (place.lane.column != 0) return;
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      store_4(to + place.quarter * queries + place.query(m), float4{x[m], x[m + 1], x[m + 2], x[m + 3]});
    }
  };
  float of_row[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    of_row[m] = lowest;
#pragma unroll
    for (int n = 0; n < N; ++n) of_row[m] = fmaxf(of_row[m], s[m][n]);
  }
  over_row(of_row, [](float x, float y) { return fmaxf(x, y); });
  store_row(of_row, shared + maxima_at);
  __syncthreads();  // the maxima of all quarters are there
#pragma unroll
  for (int m = 0; m < M; m += 4) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float4 other = load_four(shared + maxima_at + quarter * queries + place.query(m));
#pragma unroll
      for (int n = 0; n < 4; ++n) of_row[m + n] = fmaxf(of_row[m + n], element(other, n));
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float maximum = of_row[m];
    of_row[m] = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      s[m][n] = exp2_approx((s[m][n] - maximum) * call.unit);
      of_row[m] += s[m][n];
    }
  }
#pragma unroll
  for (int m = 0; m < M; m += 4) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      store_4(shared + p_at + Queries::offset(place.key(n)) + place.query(m),
              float4{s[m][n], s[m + 1][n], s[m + 2][n], s[m + 3][n]});
    }
  }
  over_row(of_row, [](float x, float y) { return x + y; });
  store_row(of_row, shared + sums_at);
}

/// What results are to be multiplied by, a query of the warp's side a lane. Writes lse, too.
__device__ __forceinline__ float join_quarters(const ShortCall& call, const Work& work, const Place& place,
                                               const float* shared) {
  const int r = place.side * side_queries + static_cast<int>(threadIdx.x) % 32;
  float maximum = lowest;
  float sum = 0;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    maximum = fmaxf(maximum, shared[maxima_at + quarter * queries + r]);
    sum += shared[sums_at + quarter * queries + r];
  }
  if (call.lse.data != nullptr && place.warp == place.side && r < work.query_count) {
    *call.lse.at(work.b, work.h, work.first_query + r) =
        sum == 0 ? minus_infinity : fmaxf(maximum * call.scale, lowest) + logf(sum);
  }
  return sum == 0 ? 0.0f : 1 / sum;
}

// Each group writes half of a lane's queries, and gets what the other has of them.
__device__ __forceinline__ void join_and_write(const ShortCall& call, const Work& work, const Place& place,
                                               const float (&o)[M][N], float* shared) {
  const bool second = place.group == 1;
  float4* exchange = reinterpret_cast<float4*>(shared + exchange_at) +
                     threadIdx.x % (threads / 2);  // [group, M, threads / 2]
  __syncthreads();                                 // everyone is done with the weights
#pragma unroll
  for (int m = 0; m < M / 2; ++m) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const float* first = o[m] + 4 * run;
      const float* last = o[m + M / 2] + 4 * run;
      exchange[((second ? 0 : M) + 2 * m + run) * (threads / 2)] =
          second ? float4{first[0], first[1], first[2], first[3]}
                 : float4{last[0], last[1], last[2], last[3]};
    }
  }
  __syncthreads();  // the other group's half is there
  float* o_gmem = call.o.at(work.b, work.h, work.first_query);
#pragma unroll
  for (int m = 0; m < M / 2; ++m) {
    const int r = place.query(second ? m + M / 2 : m);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const float4 other = exchange[((second ? M : 0) + 2 * m + run) * (threads / 2)];
      float own[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) own[d] = second ? o[m + M / 2][4 * run + d] : o[m][4 * run + d];
      const int d = place.dim_of(4 * run);
      if (r < work.query_count && d < call.dim_v) {
        store_4(o_gmem + r * call.o.stride_s + d,
                float4{own[0] + other.x, own[1] + other.y, own[2] + other.z, own[3] + other.w});
      }
    }
  }
}

__device__ __forceinline__ void attend(const ShortCall& call, float* shared) {
  const Work work(call);
  const Place place;
  Pieces pieces(call, work, shared);
  pieces.fetch(0);
  pieces.put(0);
  pieces.fetch(1);
  __syncthreads();  // the first piece is there

  constexpr int value_steps = group_keys / last_values;
  int copied = 0;  // value steps
  const auto copy = [&](int count) {
#pragma unroll 1
    for (; copied < count; ++copied) copy_values(call, work, copied, shared);
  };
  float s[M][N] = {};
  const int count = pieces.count();
  const bool sees = place.quarter * quarter_keys < work.key_count;
#pragma unroll 1
  for (int index = 0; index < count; ++index) {
    if (index + 1 < count) pieces.put(index + 1);
    if (index + 2 < count) pieces.fetch(index + 2);
    copy(min(value_steps - 1, index + 1));
    if (sees) {
      multiply_turned(s, Queries{pieces.at(index) + k_floats + place.query(0)},
                      Keys{pieces.at(index) + place.key(0)}, piece);
    }
    __syncthreads();  // the next piece is there, and everyone is done with this one
  }
  copy(value_steps);
  commit_copies();
  hide(call, work, place, s);
  softmax(call, place, s, shared);
  wait_copies<0>();
  __syncthreads();  // weights and values are there

  float o[M][N] = {};
  const int first_key = place.group * group_keys;
  multiply_turned(o, Queries{shared + p_at + Queries::offset(first_key) + place.query(0)},
                  Values{shared + place.group * group_floats + place.dim_of(0)},
                  min(group_keys, (work.key_count - first_key + 7) / 8 * 8));
  const float own_inverse = join_quarters(call, work, place, shared);
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float inverse = __shfl_sync(~0u, own_inverse, in_runs<4>(place.lane.row, m));
#pragma unroll
    for (int n = 0; n < N; ++n) o[m][n] *= inverse;
  }
  join_and_write(call, work, place, o, shared);
}

__global__ void __launch_bounds__(threads, 1) fused_short(const __grid_constant__ ShortCall call) {
  extern __shared__ __align__(16) float shared[];
  if constexpr (runs_in_code(shared_bytes)) attend(call, shared);
}

}  // namespace

bool takes_short(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  return problem.layout == Layout::dense && call.key_lengths.data == nullptr && !problem.features.sinks &&
         problem.length_k > most_keys / 2 && problem.length_k <= most_keys && problem.dim_qk > dim / 2 &&
         problem.dim_qk <= dim && problem.dim_v <= dim && ShortRows::holds(call.q) &&
         ShortRows::holds(call.k) && ShortRows::holds(call.v) && ShortRows::holds(call.o) &&
         problem.length_q < (1 << 30) && problem.batch * problem.heads_q <= 65535 &&
         shared_bytes <= device_properties(context.device.index).shared_bytes;
}

void short_forward(const AttentionCall& call, const Context& context) {
  const AttentionProblem& problem = call.problem;
  const std::int64_t offset = call.sequence(0).band_offset;
  const auto bound = [](std::int64_t distance) {
    return static_cast<int>(std::clamp<std::int64_t>(distance, -(1 << 30), 1 << 29));
  };
  const float sign = call.scale < 0 ? -1.0f : 1.0f;
  const ShortCall how{.q = ShortRows::of(call.q),
                      .k = ShortRows::of(call.k),
                      .v = ShortRows::of(call.v),
                      .o = ShortRows::of(call.o),
                      .lse = ShortRows::of(call.lse),
                      .heads = static_cast<std::uint32_t>(problem.heads_q),
                      .heads_together = static_cast<std::uint32_t>(call.group()),
                      .length_q = static_cast<int>(problem.length_q),
                      .length_k = static_cast<int>(problem.length_k),
                      .dim_qk = static_cast<int>(problem.dim_qk),
                      .dim_v = static_cast<int>(problem.dim_v),
                      .left = bound(call.band.left - offset),
                      .right = bound(call.band.right + offset),
                      .scale = static_cast<float>(call.scale) * sign,
                      .unit = static_cast<float>(call.scale * 1.4426950408889634) * sign,
                      .sign = sign};
  launch<fused_short>({.name = "tilewise fused forward, few keys",
                       .blocks = (problem.length_q + queries - 1) / queries,
                       .threads = threads,
                       .layers = static_cast<int>(problem.batch * problem.heads_q),
                       .shared_bytes = shared_bytes,
                       .stream = static_cast<cudaStream_t>(context.stream)},
                      how);
}

}  // namespace tilewise::cuda::simt
