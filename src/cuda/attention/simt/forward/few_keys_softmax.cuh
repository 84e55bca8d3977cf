#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/simt/forward/few_keys_tile.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::simt::few_keys {

// From queries and keys to weights: the first product, then what it hides, then the softmax over all keys.

/// s[m][n] += Σ_k q[k][m]·k[k][n] over `depth` k. In each step `meanwhile(step)` does something beside: all
/// at once it would keep the product's loads waiting.
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
        const int n = to_and_fro(m % 2 == 1, visit, N);
        s[m][n] = fmaf(element(q4[step % 2][m / 4], m % 4), element(k4[step % 2][n / 4], n % 4), s[m][n]);
      }
    }
  }
}

/// The products of all queries and keys. Begins to copy the values, too.
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
  __syncthreads();  // the first piece is there

  const float* q_smem = shared + places_at + k_floats + place.query(0);
  const float* k_smem = shared + places_at + place.key(0);
#pragma unroll 1
  for (unsigned half = 0; half < halves; ++half) {
    const unsigned at = half / 2 % 2 * place_floats;
    const unsigned second = half % 2;
    // What is put or fetched past the last piece meets nobody.
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
    if (half % 2 == 1) __syncthreads();  // the next piece is there, and everyone is done with this one
  }
  for (int eight = static_cast<int>(halves) * 4; eight < most_keys / 8; ++eight) values.copy(eight);
}

// A lane's S (accumulator.cuh).
struct View {
  static constexpr int queries = M;
  static constexpr int keys = N;
  static __device__ __forceinline__ float& at(float (&s)[M][N], int q, int k) { return s[q][k]; }
  static __device__ __forceinline__ constexpr int step(int k) { return in_runs<8>(0, k); }
};

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
    hide_outside<View>(s, m, first, last);
  }
}

// Scores to weights, in shared memory, by the maxima of rows over all quarters.
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
      store_4(shared + p_at + Weights::offset(place.key(n)) + place.query(m),
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
    *call.lse.first(work.b, work.h, work.first_query + r) =
        sum == 0 ? minus_infinity : fmaxf(maximum * call.scale, lowest) + logf(sum);
  }
  return sum == 0 ? 0.0f : 1 / sum;
}

}  // namespace tilewise::cuda::simt::few_keys
