#pragma once

#include "cuda/attention/simt/forward/few_keys_tile.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::simt::few_keys {

/// Queries and keys on their way. They come by halves: half n is piece n / 2 of half n % 2 of the rows, five
/// loads a thread, the last of which is of queries. A warp reads 128 bytes of four rows and writes, turned,
/// to as many banks as it has lanes. Rows past the last are the last again; what comes of them is hidden, or
/// not written.
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
        q_smem_(shared + places_at + k_floats + Queries::offset(column()) + row()),
        k_smem_(shared + places_at + Keys::offset(column()) + row()) {}

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
  /// Where a half goes.
  struct Target {
    float *q_smem, *k_smem;
  };
  __device__ Target target(unsigned half) const {
    const unsigned place = half / 2 % 2 * place_floats;
    return {q_smem_ + place + half % 2 * (queries / 2), k_smem_ + place + half % 2 * group_keys};
  }
  /// Dims d and d + 1 of the four.
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
  static constexpr int rows = threads / 8;  // that all threads have at a time
  static_assert(2 * rows == queries && rows * (loads - 1) == group_keys);

  __device__ static int column() { return static_cast<int>(threadIdx.x) % 8 * 4; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / 8; }

  float *q_gmem_, *k_gmem_;
  int q_stride_bytes_, k_stride_bytes_, last_query_, last_key_;
  float *q_smem_, *k_smem_;
};

/// Copies of values, eight rows at a time: a warp a row. Rows past the last come as the last again, since a
/// copy that may be of nothing takes more instructions, and are cleared when all are there.
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
  /// Waits for the thread's own copies.
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

}  // namespace tilewise::cuda::simt::few_keys
