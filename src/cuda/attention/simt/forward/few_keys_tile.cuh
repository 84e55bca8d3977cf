#pragma once

#include "cuda/attention/simt/forward/few_keys_call.cuh"
#include "cuda/attention/simt/forward/fused_short.h"
#include "cuda/attention/simt/multiply.cuh"

namespace tilewise::cuda::simt::few_keys {

// What a block has, where in shared memory, and which of it is a thread's.

constexpr int queries = ShortTile::queries;
constexpr int most_keys = 256;
constexpr int dim = ShortTile::dim;
constexpr int warps = 8;
constexpr int threads = warps * 32;
constexpr int M = 8;  // queries of a lane
constexpr int N = 8;  // its keys, then its dims
constexpr int piece = 32;
constexpr int side_queries = queries / 2;
constexpr int quarter_keys = most_keys / 4;
constexpr int group_keys = most_keys / 2;

using Lane = Lanes<4, true>;
using Queries = TurnedInFours<queries, 4, 4>;  // [piece, queries]
using Keys = TurnedInFours<most_keys, 8, 4>;   // [piece, keys]
using Weights = TurnedInFours<queries, 4, 8>;  // [keys, queries]
using Values = Turned<dim, 8>;                 // [keys, dim]

// Floats in shared memory. Weights come when keys and queries are done with, and an exchange of results when
// weights are.
constexpr int k_floats = Keys::offset(piece);
constexpr int place_floats = k_floats + Queries::offset(piece);
constexpr int v_at = 0;
constexpr int places_at = v_at + most_keys * dim;  // of two pieces
constexpr int p_at = places_at;
constexpr int exchange_at = places_at;
constexpr int maxima_at = places_at + 2 * place_floats;  // [quarter, queries]
constexpr int sums_at = maxima_at + 4 * queries;         // [quarter, queries]
constexpr int all_floats = sums_at + 4 * queries;
static_assert(Weights::offset(most_keys) <= 2 * place_floats);
static_assert(threads * M * N / 2 <= 2 * place_floats);
constexpr std::size_t shared_bytes = sizeof(float) * all_floats;

/// What a block works on.
struct Work {
  std::uint32_t b, h, key_head;
  int first_query, query_count, first_key, key_count;

  __device__ explicit Work(const ShortCall& call) {
    b = call.heads.quotient(blockIdx.y);
    h = blockIdx.y - b * call.heads.value;
    key_head = call.heads_together.quotient(h);
    first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * queries;  // the last see the most keys
    query_count = min(queries, call.length_q - first_query);
    first_key = min(max(0, first_query - call.left), call.length_k - 1);
    key_count = max(0, min(call.length_k, first_query + query_count + call.right) - first_key);
  }
};

/// Where a thread stands.
struct Place {
  int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // the same to the compiler, too
  Lane lane;
  int side = warp % 2;      // of the queries
  int quarter = warp / 2;   // of the keys, in the first product
  int half = warp / 2 % 2;  // of the dims, in the second
  int group = warp / 4;     // there: of the keys

  __device__ int query(int m) const { return side * side_queries + in_runs<4>(lane.row, m); }
  __device__ int key(int n) const { return quarter * quarter_keys + in_runs<8>(lane.column, n); }
  __device__ int dim_of(int n) const { return half * (dim / 2) + in_runs<8>(lane.column, n); }
};

}  // namespace tilewise::cuda::simt::few_keys
