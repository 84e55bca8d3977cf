#pragma once

#include "cuda/attention/common/backward/batch_rows.cuh"

namespace tilewise::cuda::mma {

// dq from its sums. A warp has 16 queries and goes through their dims in parts of four eights: it reads
// fragments as they lie, 512 bytes each, and lanes that share a query change words so that each writes eight
// dims of it.

/// The queries of one of QuerySums' tiles.
struct TileQueries {
  std::int64_t b;      ///< the sequence
  std::int64_t first;  ///< in it
  std::int64_t count;  ///< at most 16; none where nobody's queries would be

  __device__ TileQueries(const AttentionCall& call, std::int64_t tile) {
    std::int64_t end;
    if (call.packed()) {
      std::int64_t high = call.problem.batch;
      for (b = 0; high - b > 1;) {
        const std::int64_t middle = (b + high) / 2;
        (QuerySums::first_tile(call, middle) <= tile ? b : high) = middle;
      }
      first = (tile - QuerySums::first_tile(call, b)) * 16;
      end = call.cumulative_q.at(b + 1) - call.cumulative_q.at(b);
    } else {
      const Division entry(tile, QuerySums::entry_tiles(call));
      b = entry.quotient;
      const std::int64_t run = QuerySums::run(call);
      const Division block(entry.rest, (run + 15) / 16);
      first = block.quotient * run + block.rest * 16;
      end = min((block.quotient + 1) * run, call.problem.length_q);
    }
    count = max(std::int64_t{0}, min(std::int64_t{16}, end - first));
  }
};

/// Four lanes have a word each of four rows: then each has the four words of one row.
__device__ __forceinline__ void exchange_words(std::uint32_t (&word)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int other = 1; other < 4; other *= 2) {
    const bool upper = (lane & other) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((n & other) != 0) continue;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? word[n] : word[n + other], other);
      (upper ? word[n] : word[n + other]) = got;
    }
  }
}

/// What a warp writes of a tile: `parts` of four eights of dims from `first_part` on.
struct DqWork {
  std::int64_t head, tile;
  int first_part, parts;
};

/// Writes what a lane has of four eights of dims, in any type: of queries s and s + 8, two dims of each eight
/// from `first` on.
__device__ __forceinline__ void store_sums(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t s,
                                           const bool (&there)[2], int first, int dims, float factor,
                                           const float (&sum)[2][4][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!there[half]) continue;
    std::byte* to = rows.at(b, h, s + 8 * half);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int d = first + e / 2 * 8 + e % 2;
      if (d < dims) store_element(to + d * size_of(rows.dtype), rows.dtype, sum[half][e / 2][e % 2] * factor);
    }
  }
}

/// `wide`: a piece's results, in f32 or in T.
template <typename T, bool wide>
__device__ __forceinline__ void finish_dq(const AttentionCall& call, const BackwardSpace& space,
                                          const DqWork& work) {
  const TileQueries queries(call, work.tile);
  if (queries.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto dims = static_cast<int>(call.problem.dim_qk);
  const std::int64_t b = call.packed() ? 0 : queries.b;
  const std::int64_t s = (call.packed() ? call.first_row_q(queries.b) : 0) + queries.first + lane / 4;
  const bool there[2] = {lane / 4 < queries.count, lane / 4 + 8 < queries.count};  // queries a lane has
  std::byte* to = row_of_halves(call.dq, b, work.head, s);
  const bool aligned = aligned_chunks(call.dq);
  const float factor = static_cast<float>(call.scale) * gradient_scale<T>(call, space).down;
  const int end = min(space.dq.eights, (work.first_part + work.parts) * 4);
#pragma unroll 1
  for (int eight = work.first_part * 4; eight < end; eight += 4) {
    const float* fragment = space.dq.at(work.head, work.tile, eight) + lane * 4;
    float sum[2][4][2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (eight + e >= end) continue;
      const float4 four = *reinterpret_cast<const float4*>(fragment + e * QuerySums::fragment);
      sum[0][e][0] = four.x;
      sum[0][e][1] = four.y;
      sum[1][e][0] = four.z;
      sum[1][e][1] = four.w;
    }
    if constexpr (wide) {
      store_sums(call.dq, b, work.head, s, there, eight * 8 + lane % 4 * 2, dims, factor, sum);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t word[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) word[e] = pack<T>(sum[half][e][0] * factor, sum[half][e][1] * factor);
        exchange_words(word);
        const int first = (eight + lane % 4) * 8;
        if (!there[half] || first >= dims) continue;
        store_eight(to + 8 * half * call.dq.stride_s * 2, first, dims, aligned,
                    {word[0], word[1], word[2], word[3]});
      }
    }
  }
}

}  // namespace tilewise::cuda::mma
