#pragma once

#include "cuda/attention/simt/forward/few_keys_copies.cuh"

namespace tilewise::cuda::simt::few_keys {

// The first product.

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
      for (int turn = 0; turn < N; ++turn) {
        const int n = to_and_fro(m % 2 == 1, turn, N);
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

}  // namespace tilewise::cuda::simt::few_keys
