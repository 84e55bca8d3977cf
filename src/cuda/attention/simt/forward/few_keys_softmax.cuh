#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/rows.h"
#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/fused_short.h"
#include "cuda/attention/simt/multiply.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::simt::few_keys {

// The parts of the kernel for few keys (fused_short.cu) before P·V: its parameters, a CTA's shared memory,
// the loads, the product Q·Kᵀ and the softmax.

/// The rows of a tensor. The address of a row of the CTA's entry and head takes one instruction: a 32-bit
/// product added to a 64-bit address.
struct ShortRows {
  float* data;
  std::int64_t stride_b, stride_h;
  int stride_bytes;  // from one row to the next

  static ShortRows of(const Rows& rows) {
    return {rows.wanted ? reinterpret_cast<float*>(rows.data) : nullptr, rows.stride_b, rows.stride_h,
            static_cast<int>(rows.stride_s * static_cast<std::int64_t>(sizeof(float)))};
  }
  /// Whether 32 bits are enough for the stride in bytes.
  static bool holds(const Rows& rows) { return std::abs(rows.stride_s) < (1 << 28); }
  __device__ float* first(std::uint32_t b, std::uint32_t h, int row) const {
    return at(data + b * stride_b + h * stride_h, row);
  }
  __device__ float* at(float* first, int row) const { return row_at(first, row, stride_bytes); }
  __device__ static float* row_at(float* first, int row, int stride_bytes) {
    return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(first) +
                                    static_cast<std::int64_t>(row) * stride_bytes);
  }
};

/// Divides numbers far below 2^16 by a product with the inverse.
struct Divisor {
  std::uint32_t value, inverse;  // 2^31 / value, rounded up

  static Divisor of(std::int64_t value) {
    return {static_cast<std::uint32_t>(value),
            static_cast<std::uint32_t>(((std::int64_t{1} << 31) + value - 1) / value)};
  }
  __device__ std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * inverse) >> 31);
  }
};

/// The kernel's parameters, as few as possible: the constant cache is cold when a kernel starts, and every
/// line of it is a miss.
struct ShortCall {
  ShortRows q, k, v, o, lse;
  Divisor heads, gqa_group;  // query heads, and query heads per key head
  int length_q, length_k, dim_qk, dim_v;
  int left, right;    // query i sees keys i − left up to i + right
  float scale, unit;  // the scale's absolute value, in natural units and for exp2
  bool negative;      // whether the scale is negative, so that S is negated
};

constexpr int queries = ShortTile::queries;
constexpr int most_keys = 256;
constexpr int dim = ShortTile::dim;
constexpr int warps = 8;
constexpr int threads = warps * 32;
constexpr int M = 8;       // queries of a lane
constexpr int N = 8;       // keys of a lane in S, dims in O
constexpr int piece = 32;  // dims of a piece of D
constexpr int side_queries = queries / 2;
constexpr int quarter_keys = most_keys / 4;
constexpr int group_keys = most_keys / 2;

using Lane = Lanes<4, true>;
using Queries = PaddedTransposed<queries, 4, 4>;  // [piece, queries]
using Keys = PaddedTransposed<most_keys, 8, 4>;   // [piece, keys]
using P = PaddedTransposed<queries, 4, 8>;        // [keys, queries]
using Values = Transposed<dim, 8>;                // [keys, dim]

// Offsets in shared memory, in floats. P overwrites the pieces of Q and K, and the exchange of O overwrites
// P.
constexpr int k_floats = Keys::offset(piece);
constexpr int stage_floats = k_floats + Queries::offset(piece);
constexpr int v_at = 0;
constexpr int stages_at = v_at + most_keys * dim;  // two stages, each a piece of K and Q
constexpr int p_at = stages_at;
constexpr int exchange_at = stages_at;
constexpr int maxima_at = stages_at + 2 * stage_floats;  // [quarter, queries]
constexpr int sums_at = maxima_at + 4 * queries;         // [quarter, queries]
constexpr int all_floats = sums_at + 4 * queries;
static_assert(P::offset(most_keys) <= 2 * stage_floats);
static_assert(threads * M * N / 2 <= 2 * stage_floats);
constexpr std::size_t shared_bytes = sizeof(float) * all_floats;

/// The CTA's queries, and the keys that they see.
struct Work {
  std::uint32_t b, h, key_head;
  int first_query, query_count, first_key, key_count;

  __device__ explicit Work(const ShortCall& call) {
    b = call.heads.quotient(blockIdx.y);
    h = blockIdx.y - b * call.heads.value;
    key_head = call.gqa_group.quotient(h);
    // The last queries see the most keys, so they come first.
    first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * queries;
    query_count = min(queries, call.length_q - first_query);
    first_key = min(max(0, first_query - call.left), call.length_k - 1);
    key_count = max(0, min(call.length_k, first_query + query_count + call.right) - first_key);
  }
};

/// The thread's place in the CTA, and the queries, keys and dims of its elements of S and O.
struct Place {
  // The shuffle tells the compiler that all lanes have the same number.
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  Lane lane;
  int side = warp % 2;      // half of the queries
  int quarter = warp / 2;   // quarter of the keys in Q·Kᵀ
  int half = warp / 2 % 2;  // half of the dims in P·V
  int group = warp / 4;     // half of the keys in P·V

  __device__ int query(int m) const { return side * side_queries + in_runs<4>(lane.row, m); }
  __device__ int key(int n) const { return quarter * quarter_keys + in_runs<8>(lane.column, n); }
  __device__ int dim_of(int n) const { return half * (dim / 2) + in_runs<8>(lane.column, n); }
};

/// Loads pieces of Q and K into registers and stores them transposed in shared memory. A step has half of the
/// rows: step n loads piece n / 2 of half n % 2 of the rows, with five loads per thread, the last of which is
/// of Q. A warp reads 128 bytes of four rows and writes to as many banks as it has lanes. Past the last row,
/// the last row is read again; its results are hidden or not written.
class Pieces {
 public:
  static constexpr int loads = 5;

  __device__ Pieces(const ShortCall& call, const Work& work, float* shared)
      : q_gmem_(call.q.first(work.b, work.h, work.first_query) + column()),
        k_gmem_(call.k.first(work.b, work.key_head, work.first_key) + column()),
        q_stride_bytes_(call.q.stride_bytes),
        k_stride_bytes_(call.k.stride_bytes),
        last_query_(work.query_count - 1),
        last_key_(max(0, work.key_count - 1)),
        q_smem_(shared + stages_at + k_floats + Queries::offset(column()) + row()),
        k_smem_(shared + stages_at + Keys::offset(column()) + row()) {}

  __device__ float4 fetch(unsigned half, int n) const {
    const int first = static_cast<int>(half / 2) * piece;
    const int side = static_cast<int>(half % 2);
    const float* from =
        n + 1 == loads
            ? ShortRows::row_at(q_gmem_ + first, min(row() + side * (queries / 2), last_query_),
                                q_stride_bytes_)
            : ShortRows::row_at(k_gmem_ + first, min(row() + side * group_keys + n * rows, last_key_),
                                k_stride_bytes_);
    return __ldg(reinterpret_cast<const float4*>(from));
  }
  /// The thread's addresses in shared memory for one step.
  struct Target {
    float *q_smem, *k_smem;
  };
  __device__ Target target(unsigned half) const {
    const unsigned place = half / 2 % 2 * stage_floats;
    return {q_smem_ + place + half % 2 * (queries / 2), k_smem_ + place + half % 2 * group_keys};
  }
  /// Stores dims d and d + 1 of the four.
  __device__ void put(const Target& to, int n, int d, const float4& four) const {
    if (n + 1 == loads) {
      to.q_smem[Queries::offset(d)] = element(four, d);
      to.q_smem[Queries::offset(d + 1)] = element(four, d + 1);
    } else {
      to.k_smem[Keys::offset(d) + n * rows] = element(four, d);
      to.k_smem[Keys::offset(d + 1) + n * rows] = element(four, d + 1);
    }
  }

 private:
  static constexpr int rows = threads / 8;  // rows that all threads load at once
  static_assert(2 * rows == queries && rows * (loads - 1) == group_keys);

  __device__ static int column() { return static_cast<int>(threadIdx.x) % 8 * 4; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / 8; }

  float *q_gmem_, *k_gmem_;
  int q_stride_bytes_, k_stride_bytes_, last_query_, last_key_;
  float *q_smem_, *k_smem_;
};

/// Copies V into shared memory, eight rows at a time, one per warp. Past the last row, the last row is copied
/// again, since a copy that may be empty takes more instructions. finish() then clears these rows.
class ValueCopies {
 public:
  __device__ ValueCopies(const ShortCall& call, const Work& work, float* shared)
      : v_gmem_(call.v.first(work.b, work.key_head, work.first_key) + (column() < call.dim_v ? column() : 0)),
        stride_bytes_(call.v.stride_bytes),
        key_count_(work.key_count),
        to_smem_(shared + v_at + row() * dim + column()) {}

  __device__ void copy(int eight) const {
    const int key = min(eight * 8 + row(), max(0, key_count_ - 1));
    copy_async_16(to_smem_ + eight * 8 * dim, ShortRows::row_at(v_gmem_, key, stride_bytes_), true);
  }
  /// Waits for the thread's own copies, and clears its rows past the last.
  __device__ void finish() const {
    commit_copies();
    wait_copies<0>();
    for (int eight = max(0, key_count_ - row() + 7) / 8; eight < most_keys / 8; ++eight) {
      store_4(to_smem_ + eight * 8 * dim, float4{});
    }
  }

 private:
  __device__ static int column() { return static_cast<int>(threadIdx.x) % 32 * 4; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / 32; }

  float* v_gmem_;
  int stride_bytes_, key_count_;
  float* to_smem_;
};

// From Q and K to P: the product, the band, and the softmax over all keys.

/// s[m][n] += Σ_k q[k][m]·k[k][n] for `depth` k. Each step also calls `meanwhile(step)`, a part of other
/// work, which would delay the product's loads if it came all at once.
template <int depth, typename Meanwhile>
__device__ __forceinline__ void multiply_meanwhile(float (&s)[M][N], const Queries& q, const Keys& k,
                                                   const Meanwhile& meanwhile) {
  float4 q4[2][M / 4], k4[2][N / 4];
  const auto load = [&](int step) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      q4[step % 2][run] = q.at(step, run);
      k4[step % 2][run] = k.at(step, run);
    }
  };
  load(0);
#pragma unroll
  for (int step = 0; step < depth; ++step) {
    if (step + 1 < depth) load(step + 1);
    meanwhile(step);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int visit = 0; visit < N; ++visit) {
        const int n = back_and_forth(m % 2 == 1, visit, N);
        s[m][n] = fmaf(element(q4[step % 2][m / 4], m % 4), element(k4[step % 2][n / 4], n % 4), s[m][n]);
      }
    }
  }
}

/// Q·Kᵀ of all queries and keys. Also starts the copies of V.
__device__ __forceinline__ void multiply_keys(const ShortCall& call, const Work& work, const Place& place,
                                              const ValueCopies& values, float (&s)[M][N], float* shared) {
  const Pieces pieces(call, work, shared);
  const unsigned halves = static_cast<unsigned>(call.dim_qk) / piece * 2;
  constexpr int loads = Pieces::loads;
  float4 ahead[3][loads];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < loads; ++n) ahead[half][n] = pieces.fetch(half, n);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < loads; ++n) {
      pieces.put(pieces.target(half), n, 0, ahead[half][n]);
      pieces.put(pieces.target(half), n, 2, ahead[half][n]);
    }
  }
  float4(&next)[loads] = ahead[2];
#pragma unroll
  for (int n = 0; n < loads; ++n) next[n] = pieces.fetch(2, n);
  __syncthreads();  // the first piece is stored

  const float* q_smem = shared + stages_at + k_floats + place.query(0);
  const float* k_smem = shared + stages_at + place.key(0);
#pragma unroll 1
  for (unsigned half = 0; half < halves; ++half) {
    const unsigned at = half / 2 % 2 * stage_floats;
    const unsigned second = half % 2;
    // Nobody reads what is fetched and stored past the last piece.
    const Pieces::Target target = pieces.target(half + 2);
    const unsigned following = min(half + 3, halves - 1);
    multiply_meanwhile<piece / 2>(s, Queries{q_smem + at + second * Queries::offset(piece / 2)},
                                  Keys{k_smem + at + second * Keys::offset(piece / 2)}, [&](int step) {
                                    const int n = step / 3;
                                    if (n < loads) {
                                      if (step % 3 == 2) {
                                        next[n] = pieces.fetch(following, n);
                                      } else {
                                        pieces.put(target, n, step % 3 * 2, next[n]);
                                      }
                                    }
                                    if (step % 4 == 3) values.copy(static_cast<int>(half) * 4 + step / 4);
                                  });
    if (half % 2 == 1) __syncthreads();  // the next piece is stored, and all warps have read this one
  }
  for (int eight = static_cast<int>(halves) * 4; eight < most_keys / 8; ++eight) values.copy(eight);
}

// The view of a lane's S (accumulator.cuh).
struct View {
  static constexpr int queries = M;
  static constexpr int keys = N;
  static __device__ __forceinline__ float& at(float (&s)[M][N], int q, int k) { return s[q][k]; }
  static __device__ __forceinline__ constexpr int step(int k) { return in_runs<8>(0, k); }
};

// Hides keys outside the band and past the last key.
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
    hide_outside<View>(s, m, first, last);
  }
}

// Computes P before the division, with row maxima over all quarters of the keys, and stores it in shared
// memory.
__device__ __forceinline__ void softmax(const ShortCall& call, const Place& place, float (&s)[M][N],
                                        float* shared) {
  const auto over_row = [](float(&x)[M], const auto& join) {
#pragma unroll
    for (int apart = Lane::apart; apart < 8 * Lane::apart; apart *= 2) {
#pragma unroll
      for (int m = 0; m < M; ++m) x[m] = join(x[m], __shfl_xor_sync(~0u, x[m], apart));
    }
  };
  const auto store_row = [&](const float(&x)[M], float* to) {
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
  __syncthreads();  // the maxima of all quarters are stored
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
      store_4(shared + p_at + P::offset(place.key(n)) + place.query(m),
              float4{s[m][n], s[m + 1][n], s[m + 2][n], s[m + 3][n]});
    }
  }
  over_row(of_row, [](float x, float y) { return x + y; });
  store_row(of_row, shared + sums_at);
}

/// 1 / the row sum over all quarters: lane n has that of query n of the warp's side. Also writes LSE.
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
    *call.lse.first(work.b, work.h, work.first_query + r) =
        sum == 0 ? minus_infinity : fmaxf(maximum * call.scale, lowest) + logf(sum);
  }
  return sum == 0 ? 0.0f : 1 / sum;
}

}  // namespace tilewise::cuda::simt::few_keys
