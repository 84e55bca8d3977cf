#pragma once

#include "cuda/mma/backward_batch_rows.cuh"
#include "cuda/mma/backward_peaks.cuh"

namespace tilewise::cuda::mma {

// What peaks add to dk and dv, in one order. Queries are many and peaks few, so that a key does not look at
// all that see it: it is noted which keys have a peak, and for every 32 queries at which parts of the keys
// they point.

/// Notes at which parts of the keys the queries of a warp point. All of its lanes are here.
__device__ __forceinline__ void note_parts(const PeakPlaces& places, const RowPeaks& peaks, int first_k) {
  static_assert(PeakPlaces::queries == 32);
  std::uint64_t marks = 0;
  for (int f = 0; f < peaks.count; ++f) marks |= places.mark_of(peaks.at(f).key - first_k);
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
    const bool listed = key < shares.keys && has_peak(key) && BatchRow::of_key(call, key).owned;
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

  /// Adds the first `present` rows, each times its factor, one after another; they are loaded together.
  template <typename T, int most>
  __device__ void add(int present, const float (&factor)[most], const std::byte* const (&row)[most]) {
    T loaded[most][lane_dims];
#pragma unroll
    for (int m = 0; m < most; ++m) {
#pragma unroll
      for (int n = 0; n < lane_dims; ++n) {
        if (m < present && place(n) < dims) loaded[m][n] = reinterpret_cast<const T*>(row[m])[place(n)];
      }
    }
#pragma unroll
    for (int m = 0; m < most; ++m) {
#pragma unroll
      for (int n = 0; n < lane_dims; ++n) {
        if (m < present && place(n) < dims) element[n] = fmaf(factor[m], widen(loaded[m][n]), element[n]);
      }
    }
  }
  template <typename Put>
  __device__ void each(const Put& put) const {
#pragma unroll
    for (int n = 0; n < lane_dims; ++n) {
      if (place(n) < dims) put(place(n), element[n]);
    }
  }
};

/// A key with a peak, and the queries that see it.
struct PeakKey {
  std::int64_t index;  ///< of [Hkv, rows_k]
  std::int64_t b, h;
  Sequence sequence;
  int row;  ///< in k, as peaks have it
  std::int64_t first_query, end_query;

  __device__ PeakKey(const AttentionCall& call, std::int64_t index_) : index(index_) {
    const BatchRow found = BatchRow::of_key(call, index);
    b = found.b;
    if (call.packed()) {
      std::int64_t end = call.problem.batch;
      while (end - b > 1) {
        const std::int64_t middle = (b + end) / 2;
        (call.cumulative_k.at(middle) <= found.s ? b : end) = middle;
      }
    }
    h = found.h;
    sequence = call.sequence(b);
    row = static_cast<int>(found.s);
    const std::int64_t position = place() - sequence.band_offset;
    first_query = max(std::int64_t{0}, position - call.band.right);
    end_query = min(sequence.length_q, position + 1 + call.band.left);
  }
  /// In the sequence.
  __device__ std::int64_t place() const { return row - sequence.first_k; }
};

/// What peaks add to dk and dv of a key.
template <typename T, int lane_dims>
struct OrderedSum {
  static constexpr int at_once = 4;  ///< queries whose rows are loaded together
  const AttentionCall& call;
  const RowValues& rows;
  LaneVector<lane_dims> dk, dv;

  __device__ OrderedSum(const AttentionCall& call_, const RowValues& rows_)
      : call(call_),
        rows(rows_),
        dk{.dims = static_cast<int>(call.problem.dim_qk)},
        dv{.dims = static_cast<int>(call.problem.dim_v)} {}

  /// Of 32 queries of a head, a lane each: this one is `row` of [Hq, rows_q], and query i where it is
  /// `there`.
  __device__ void add(const PeakKey& key, std::int64_t head, std::int64_t row, std::int64_t i, bool there) {
    const RowPeaks peaks(rows, row, there);
    Peak own{.key = -1};
#pragma unroll 2
    for (int f = 0; f < peaks.count; ++f) {
      const Peak peak = peaks.at(f);
      if (peak.key == key.row) own = peak;
    }
    unsigned left = __ballot_sync(~0u, own.key == key.row);
    const float weight = fmaxf(0.0f, own.weight) * static_cast<float>(1 << weight_bits<T>);
    while (left != 0) {
      float gradients[at_once], weights[at_once];
      const std::byte* q[at_once];
      const std::byte* d_o[at_once];
      const int present = min(__popc(left), at_once);
#pragma unroll
      for (int m = 0; m < at_once; ++m) {
        const int from = max(0, __ffs(static_cast<int>(left)) - 1);
        gradients[m] = __shfl_sync(~0u, own.x, from);
        weights[m] = __shfl_sync(~0u, weight, from);
        const std::int64_t s = key.sequence.first_q + __shfl_sync(~0u, i, from);
        q[m] = row_of_halves(call.q, key.b, head, s);
        d_o[m] = row_of_halves(call.d_o, key.b, head, s);
        left &= left - 1;
      }
      dk.template add<T>(present, gradients, q);
      dv.template add<T>(present, weights, d_o);
    }
  }
  /// Of all queries that see the key, `member` of so many warps that share them.
  template <int warps>
  __device__ void add_all(const PeakKey& key, const PeakPlaces& places, int member) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto queries = static_cast<int>(max(std::int64_t{0}, key.end_query - key.first_query));
    const int marks_a_head = (queries + PeakPlaces::queries - 1) / PeakPlaces::queries + 1;
    const int marks = static_cast<int>(call.group()) * marks_a_head;
    const std::int64_t first_row =
        key.h * call.group() * call.rows_q() + call.first_row_q(key.b) + key.first_query;
    const std::uint64_t part = places.mark_of(key.place());
    struct Mark {
      int head;                     // of the group
      std::int64_t first_row, row;  // of the head's queries that see the key; of those of the mark
    };
    const auto mark_at = [&](int index) {
      Mark mark{.head = index / marks_a_head};
      mark.first_row = first_row + mark.head * call.rows_q();
      mark.row = (mark.first_row / PeakPlaces::queries + index % marks_a_head) * PeakPlaces::queries;
      return mark;
    };
    // Neighbours are taken by different warps: with causal the first queries have most peaks.
    for (int first = 0; first < marks; first += 32 * warps) {
      const auto index_of = [&](int own_lane) { return first + own_lane * warps + member; };
      bool marked = false;
      if (index_of(lane) < marks) {
        const Mark mark = mark_at(index_of(lane));
        marked =
            mark.row < mark.first_row + queries && (places.marks[mark.row / PeakPlaces::queries] & part) != 0;
      }
      for (unsigned left = __ballot_sync(~0u, marked); left != 0; left &= left - 1) {
        const Mark mark = mark_at(index_of(__ffs(static_cast<int>(left)) - 1));
        const std::int64_t row = mark.row + lane;
        const std::int64_t in_head = row - mark.first_row;
        add(key, key.h * call.group() + mark.head, row, key.first_query + in_head,
            in_head >= 0 && in_head < queries);
      }
    }
  }
};

/// Adds what peaks add to the keys that have one, so many warps a key.
template <typename T, int lanes, int warps>
__global__ void __launch_bounds__(row_threads)
    mend_keys_in_order(const __grid_constant__ AttentionCall call,
                       const __grid_constant__ BackwardSpace space) {
  constexpr int teams = row_threads / 32 / warps;
  constexpr int most_dims = 8 * lanes;
  static_assert(warps == 1 || teams == 1, "a team that joins sums is a block");
  __shared__ float sums[warps > 1 ? warps : 1][2][warps > 1 ? most_dims : 1];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int member = warp % warps;
  const std::uint32_t count = *space.places.key_count;
  for (std::uint32_t n = blockIdx.x * teams + warp / warps; n < count; n += gridDim.x * teams) {
    const PeakKey key(call, space.places.keys[n]);
    OrderedSum<T, lanes / 4> sum(call, space.rows);
    sum.template add_all<warps>(key, space.places, member);
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
