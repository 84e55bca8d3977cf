#pragma once

#include "cuda/attention/common/backward/batch_rows.cuh"
#include "cuda/attention/common/backward/tile_peaks.cuh"
#include "cuda/ptx/dependent.cuh"

namespace tilewise::cuda::mma {

// What peaks add to dk and dv, in one order. Queries are many and peaks few, so that a key does not look at
// all that see it: it is noted which keys have a peak, and for every 32 queries at which parts of the keys
// they point.

/// Notes at which parts of the keys the queries of a warp point. All of its lanes are here.
__device__ __forceinline__ void note_parts(const PeakPlaces& places, const RowPeaks& peaks, int first_k) {
  static_assert(PeakPlaces::queries == 32);
  std::uint64_t marks = 0;
  for (int f = 0; f < peaks.count; ++f)
    marks |= std::uint64_t{1} << places.part_of(peaks.at(f).key - first_k);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) marks |= __shfl_xor_sync(~0u, marks, other);
  if (threadIdx.x % 32 == 0 && peaks.row < peaks.rows.count) {
    places.marks[peaks.row / PeakPlaces::queries] = marks;
  }
}

/// Lists the keys that have a peak. Whole blocks are here, of a grid that shares the keys.
__device__ __forceinline__ void list_keys(const AttentionCall& call, const BackwardSpace& space) {
  const KeyShares& shares = space.shares;
  const auto has_peak = [&](std::int64_t key) {
    if (shares.count == 1) return space.key_has_peak[key] != 0;
    bool found = false;
    for (int share = 0; share < shares.count; ++share) {
      found = found || shares.has_peak[share * shares.keys + key] != 0;
    }
    return found;
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = std::int64_t{gridDim.x} * row_threads;
  for (std::int64_t first = std::int64_t{blockIdx.x} * row_threads + threadIdx.x - lane; first < shares.keys;
       first += step) {
    const std::int64_t key = first + lane;
    const bool listed = key < shares.keys && BatchRow::of_key(call, key).owned && has_peak(key);
    const unsigned all = __ballot_sync(~0u, listed);
    if (all == 0) continue;
    std::uint32_t place = 0;
    if (lane == 0) place = atomicAdd(space.places.key_count, static_cast<unsigned>(__popc(all)));
    place = __shfl_sync(~0u, place, 0) + __popc(all & ((1u << lane) - 1));
    if (listed) space.places.keys[place] = static_cast<std::uint32_t>(key);
  }
}

/// A lane's share of a vector a key, dims 32 apart: of a row of dk or of dv.
template <int lane_dims>
struct LaneVector {
  int dims = 0;
  float element[lane_dims] = {};

  __device__ static int place(int n) { return static_cast<int>(threadIdx.x) % 32 + 32 * n; }

  template <typename T>
  __device__ void load(T (&to)[lane_dims], const std::byte* row) const {
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      if (place(n) < dims) to[n] = reinterpret_cast<const T*>(row)[place(n)];
    }
  }
  /// Adds a row that was loaded, times a factor.
  template <typename T>
  __device__ void add(float factor, const T (&row)[lane_dims]) {
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      if (place(n) < dims) element[n] = fmaf(factor, widen(row[n]), element[n]);
    }
  }
  /// Adds the first `present` rows, each times its factor, one after another. All are loaded, and together:
  /// so that none waits for another.
  template <typename T, int most, typename RowAt>
  __device__ void add(int present, const float (&factor)[most], const RowAt& row_at) {
    T loaded[most][lane_dims];
#pragma unroll
    for (int m = 0; m < most; ++m) load(loaded[m], row_at(m));
#pragma unroll
    for (int m = 0; m < most; ++m) {
      if (m < present) add(factor[m], loaded[m]);
    }
  }
  template <typename Put>
  __device__ void each(const Put& put) {
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      if (place(n) < dims) put(place(n), element[n]);
    }
  }
};

/// A key with a peak, and the queries that see it.
struct PeakKey {
  std::uint32_t index;  ///< of [Hkv, rows_k]
  int b, h;
  int row;             ///< in k, as peaks have it
  int part;            ///< of the sequence's keys
  int queries;         ///< of a head, that see it
  std::int64_t query;  ///< the first of them, in q
  std::int64_t first;  ///< the same of the group's first head, of [Hq, rows_q]

  __device__ PeakKey(const AttentionCall& call, const PeakPlaces& places, std::uint32_t index_)
      : index(index_) {
    const BatchRow found = BatchRow::of_key(call, index);
    std::int64_t entry = found.b;
    if (call.packed()) {
      std::int64_t end = call.problem.batch;
      while (end - entry > 1) {
        const std::int64_t middle = (entry + end) / 2;
        (call.cumulative_k.at(middle) <= found.s ? entry : end) = middle;
      }
    }
    const Sequence sequence = call.sequence(entry);
    const std::int64_t key = found.s - sequence.first_k;
    const std::int64_t position = key - sequence.band_offset;
    const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t end_query = min(sequence.length_q, position + 1 + call.band.left);
    b = static_cast<int>(entry);
    h = static_cast<int>(found.h);
    row = static_cast<int>(found.s);
    part = places.part_of(key);
    queries = static_cast<int>(max(std::int64_t{0}, end_query - first_query));
    query = sequence.first_q + first_query;
    first = found.h * call.group() * call.rows_q() + call.first_row_q(entry) + first_query;
  }
};

/// What peaks add to dk and dv of a key. Rows of so many queries are loaded together.
template <typename T, int lane_dims, int at_once>
struct OrderedSum {
  const AttentionCall& call;
  LaneVector<lane_dims> dk, dv;

  __device__ explicit OrderedSum(const AttentionCall& call_)
      : call(call_),
        dk{.dims = static_cast<int>(call.problem.dim_qk)},
        dv{.dims = static_cast<int>(call.problem.dim_v)} {}

  /// Of 32 queries of a head, a lane each; this one is the i-th of those that see the key.
  __device__ void add(const PeakKey& key, int head, const RowPeaks& peaks, int i) {
    Peak own{.key = -1};
#pragma unroll 1
    for (int f = 0; f < peaks.count; ++f) {
      const Peak peak = peaks.at(f);
      if (peak.key == key.row) own = peak;
    }
    unsigned left = __ballot_sync(~0u, own.key == key.row);
    const float weight = fmaxf(0.0f, own.weight) * static_cast<float>(1 << weight_bits<T>);
    while (left != 0) {
      float gradients[at_once], weights[at_once];
      int queries[at_once];
      const int present = min(__popc(left), at_once);
      int from = 0;
#pragma unroll
      for (int m = 0; m < at_once; ++m) {
        if (left != 0) from = __ffs(static_cast<int>(left)) - 1;  // else the last one again
        queries[m] = __shfl_sync(~0u, i, from);
        gradients[m] = __shfl_sync(~0u, own.x, from);
        weights[m] = __shfl_sync(~0u, weight, from);
        left &= left - 1;
      }
      const auto rows_of = [&](const Rows& rows) {
        return [first = row_of_halves(rows, key.b, head, key.query), stride = rows.stride_s * 2,
                &queries](int m) { return first + queries[m] * stride; };
      };
      dk.template add<T>(present, gradients, rows_of(call.q));
      dv.template add<T>(present, weights, rows_of(call.d_o));
    }
  }
  /// Of all queries that see the key, `member` of so many warps that share them.
  template <int warps>
  __device__ void add_all(const PeakKey& key, const BackwardSpace& space, int member) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto group = static_cast<int>(call.group());
    // Those of a head begin and end in the midst of a mark's.
    const int marks_a_head = (key.queries + PeakPlaces::queries - 1) / PeakPlaces::queries + 1;
    // Where a mark's queries begin: which head of the group, and which of those that see the key.
    struct Place {
      int head, i;
    };
    const auto first_of = [&](int head) { return key.first + head * call.rows_q(); };
    const auto place_of = [&](int index) {
      const int head = index / marks_a_head;
      const auto before = static_cast<int>(first_of(head) % PeakPlaces::queries);
      return Place{head, (index - head * marks_a_head) * PeakPlaces::queries - before};
    };
    // Neighbours are taken by different warps: with causal the first queries have most peaks.
    for (int first = member; first < group * marks_a_head; first += 32 * warps) {
      const int index = first + lane * warps;
      bool marked = false;
      if (index < group * marks_a_head) {
        const Place place = place_of(index);
        marked = place.i < key.queries &&
                 space.places.marked((first_of(place.head) + place.i) / PeakPlaces::queries, key.part);
      }
      for (unsigned left = __ballot_sync(~0u, marked); left != 0; left &= left - 1) {
        const Place place = place_of(first + (__ffs(static_cast<int>(left)) - 1) * warps);
        const int i = place.i + lane;
        const RowPeaks peaks(space.rows, first_of(place.head) + i, i >= 0 && i < key.queries);
        add(key, key.h * group + place.head, peaks, i);
      }
    }
  }
};

/// Adds what peaks add to the keys that have one, so many warps a key.
template <typename T, int lanes, int warps>
__global__ void __launch_bounds__(row_threads, (warps == 1 ? 3 : 2) - (lanes == 32 ? 1 : 0))
    mend_keys_in_order(const __grid_constant__ AttentionCall call,
                       const __grid_constant__ BackwardSpace space) {
  take_turn_in_chain();
  constexpr int teams = row_threads / 32 / warps;
  constexpr int most_dims = 8 * lanes;
  static_assert(warps == 1 || teams == 1, "a team that joins sums is a block");
  __shared__ float sums[warps > 1 ? warps : 1][2][warps > 1 ? most_dims : 1];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int member = warp % warps;
  const std::uint32_t count = *space.places.key_count;
  for (std::uint32_t n = blockIdx.x * teams + warp / warps; n < count; n += gridDim.x * teams) {
    const PeakKey key(call, space.places, space.places.keys[n]);
    OrderedSum<T, lanes / 4, warps == 1 || lanes == 32 ? 2 : 4> sum(call);
    sum.template add_all<warps>(key, space, member);
    float* dk = space.dk + key.index * call.problem.dim_qk;
    float* dv = space.dv + key.index * call.problem.dim_v;
    if constexpr (warps == 1) {
      if (space.dk != nullptr) sum.dk.each([&](int d, float x) { dk[d] += x; });
      if (space.dv != nullptr) sum.dv.each([&](int d, float x) { dv[d] += x; });
    } else {
      sum.dk.each([&](int d, float x) { sums[member][0][d] = x; });
      sum.dv.each([&](int d, float x) { sums[member][1][d] = x; });
      __syncthreads();  // all warps' sums are there
      const auto join = [&](int which, float* to, int dims) {
        for (int d = static_cast<int>(threadIdx.x); d < dims; d += row_threads) {
          float all = 0;
#pragma unroll
          for (int m = 0; m < warps; ++m) all += sums[m][which][d];
          to[d] += all;
        }
      };
      if (space.dk != nullptr) join(0, dk, sum.dk.dims);
      if (space.dv != nullptr) join(1, dv, sum.dv.dims);
      __syncthreads();  // they were read
    }
  }
}

}  // namespace tilewise::cuda::mma
