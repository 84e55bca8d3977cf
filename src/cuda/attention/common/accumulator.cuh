#pragma once

#include <type_traits>

namespace tilewise::cuda {

inline constexpr float log2e = 1.4426950408889634f;
inline constexpr float minus_infinity = -__builtin_huge_valf();
/// The first maximum of a row. It is finite, so that a row that sees no key needs no special case.
inline constexpr float lowest = -3.402823466e38f;

// Views of S in the register layouts of the instructions. A view names the elements by query and key,
// whatever the layout: `at(s, q, k)` is the element of the lane's query q and key k, and `step(k)` is the
// distance of that key from the lane's first one, which is known at compile time. The lane's queries and
// first key in the tile depend on the lane, so the kernel computes them. `each(body)` calls body(q, k) for
// all elements, in the order with which the kernels were measured.

/// mma.sync, S = Q·Kᵀ: s[row tiles][eights of keys][4]. A lane has rows g and g + 8 of each row tile, and of
/// every eight keys those at 2t and 2t + 1.
template <int row_tiles, int key_eights>
struct MmaView {
  static constexpr int queries = 2 * row_tiles;
  static constexpr int keys = 2 * key_eights;

  template <typename S>
  static __device__ __forceinline__ auto& at(S& s, int q, int k) {
    return s[q / 2][k / 2][2 * (q % 2) + k % 2];
  }
  static __device__ __forceinline__ constexpr int step(int k) { return 8 * (k / 2) + k % 2; }
  template <typename Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < key_eights; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(2 * r + e / 2, 2 * n + e % 2);
      }
    }
  }
};

/// The common part of transposed views: all keys of a query, then those of the next.
template <int queries_, int keys_>
struct ByQueries {
  static constexpr int queries = queries_;
  static constexpr int keys = keys_;

  template <typename Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int q = 0; q < queries; ++q) {
#pragma unroll
      for (int k = 0; k < keys; ++k) body(q, k);
    }
  }
};

/// mma.sync, Sᵀ = K·Qᵀ: s[key tiles][eights of queries][4].
template <typename S>
struct MmaTransposedView : ByQueries<2 * std::extent_v<S, 1>, 2 * std::extent_v<S, 0>> {
  template <typename Pairs>
  static __device__ __forceinline__ auto& at(Pairs& s, int q, int k) {
    return s[k / 2][q / 2][2 * (k % 2) + q % 2];
  }
  static __device__ __forceinline__ constexpr int step(int k) { return 8 * k; }
};

/// wgmma, S = Q·Kᵀ: s[columns / 2]. Element 4j + 2h + e is column 8j + 2t + e of row half h.
template <int columns>
struct WgmmaView {
  static constexpr int queries = 2;
  static constexpr int keys = columns / 4;

  static __device__ __forceinline__ float& at(float (&s)[columns / 2], int q, int k) {
    return s[k / 2 * 4 + 2 * q + k % 2];
  }
  static __device__ __forceinline__ constexpr int step(int k) { return 8 * (k / 2) + k % 2; }
  template <typename Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int n = 0; n < columns / 2; ++n) body(n / 2 % 2, n / 4 * 2 + n % 2);
  }
};

/// wgmma, Sᵀ = K·Qᵀ of a warpgroup's 64 keys: s[columns / 2].
template <int columns>
struct WgmmaTransposedView : ByQueries<columns / 4, 2> {
  static __device__ __forceinline__ float& at(float (&s)[columns / 2], int q, int k) {
    return s[q / 2 * 4 + 2 * k + q % 2];
  }
  static __device__ __forceinline__ constexpr int step(int k) { return 8 * k; }
};

/// Hides the keys outside [first, last) from the lane's query q. Keys are counted from the key for which the
/// lane's first key is `own`. The loop over queries, which computes the bounds, is the kernel's.
template <typename View, typename S>
__device__ __forceinline__ void hide_outside(S& s, int q, int first, int last, float hidden = minus_infinity,
                                             int own = 0) {
#pragma unroll
  for (int k = 0; k < View::keys; ++k) {
    const int key = own + View::step(k);  // with the call inside it, the condition would become a branch
    if (key < first || key >= last) View::at(s, q, k) = hidden;
  }
}

/// The highest score of the lane's query q.
template <typename View, typename S>
__device__ __forceinline__ float highest_of(const S& s, int q) {
  float highest = fmaxf(View::at(s, q, 0), View::at(s, q, 1));
#pragma unroll
  for (int k = 2; k < View::keys; k += 2) {
    highest = fmaxf(highest, fmaxf(View::at(s, q, k), View::at(s, q, k + 1)));
  }
  return highest;
}
/// Rescales O of a lane's row when its maximum rises. The row is half `half` of mma.sync's fragments.
template <int eights>
__device__ __forceinline__ void rescale_row(float (&o)[eights][4], int half, float factor) {
#pragma unroll
  for (int n = 0; n < eights; ++n) {
    o[n][2 * half] *= factor;
    o[n][2 * half + 1] *= factor;
  }
}

/// The maximum, and the sum, over the four lanes that share a row of S.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace tilewise::cuda
