#pragma once

#include "cuda/tile/element.cuh"
#include "cuda/wgmma/scores.cuh"

namespace tilewise::cuda::wgmma {

// What a mask adds to a tile's scores, read from memory straight to where scores are: while the tensor cores
// make these, which takes about as long as the way from the L2.

/// In natural units and in the order of scores.
template <ForwardConfig c>
using MaskValues = float[c.masked ? c.keys / 2 : 1];

__device__ __forceinline__ float mask_value(std::byte shown) {
  return shown == std::byte{0} ? minus_infinity : 0.0f;
}
__device__ __forceinline__ float mask_value(float x) { return x; }
__device__ __forceinline__ float mask_value(__half x) { return widen(x); }
__device__ __forceinline__ float mask_value(__nv_bfloat16 x) { return widen(x); }

template <typename Element>
struct alignas(2 * sizeof(Element)) MaskPair {
  Element first, second;
};

/// Of one row: columns 8j and 8j + 1 from `first_gmem` on, of `keys` that there are. `stride` lies between
/// two keys that do not come in pairs.
template <ForwardConfig c, typename Element, bool in_pairs>
__device__ __forceinline__ void read_mask_row(MaskValues<c>& values, int half, const Element* first_gmem,
                                              std::int64_t stride, int keys) {
#pragma unroll
  for (int j = 0; j < c.keys / 8; ++j) {
    float* const to = &values[4 * j + 2 * half];
    to[0] = to[1] = 0;
    if constexpr (in_pairs) {
      if (8 * j < keys) {
        const auto pair = *reinterpret_cast<const MaskPair<Element>*>(first_gmem + 8 * j);
        to[0] = mask_value(pair.first);
        to[1] = mask_value(pair.second);
      }
    } else {
      if (8 * j < keys) to[0] = mask_value(first_gmem[8 * j * stride]);
      if (8 * j + 1 < keys) to[1] = mask_value(first_gmem[(8 * j + 1) * stride]);
    }
  }
}

/// Of a lane's two rows, of which the second may be past the last. Where all rows have the same values, they
/// are read once.
template <ForwardConfig c, typename Element, bool in_pairs>
__device__ __forceinline__ void read_mask_rows(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                               int row, int rows, int key, int keys) {
  const auto* first_gmem = reinterpret_cast<const Element*>(mask.data) + b * mask.stride[0] +
                           h * mask.stride[1] + key * mask.stride[3];
  const int last = rows - 1;
  read_mask_row<c, Element, in_pairs>(values, 0, first_gmem + min(row, last) * mask.stride[2], mask.stride[3],
                                      keys - key);
  if (mask.stride[2] == 0) {
#pragma unroll
    for (int n = 0; n < c.keys / 2; n += 4) {
      values[n + 2] = values[n];
      values[n + 3] = values[n + 1];
    }
  } else {
    read_mask_row<c, Element, in_pairs>(values, 1, first_gmem + min(row + 8, last) * mask.stride[2],
                                        mask.stride[3], keys - key);
  }
}

/// `row` is the lane's row g and `key` its first key of the tile, of `rows` and `keys` that there are.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void read_mask(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                          int row, int rows, int key, int keys) {
  const auto read = [&]<typename Element>(Element) {
    mask.in_pairs ? read_mask_rows<c, Element, true>(values, mask, b, h, row, rows, key, keys)
                  : read_mask_rows<c, Element, false>(values, mask, b, h, row, rows, key, keys);
  };
  if (mask.element == MaskArguments::Element::boolean) {
    read(std::byte{});
  } else if (mask.element == MaskArguments::Element::half) {
    read(T{});
  } else {
    read(float{});
  }
}

/// Scores from products, or from what softcap and ALiBi made of them with a scale of 1.
template <ForwardConfig c>
__device__ __forceinline__ void add_mask(Scores<c>& s, const MaskValues<c>& values, float scale) {
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) s[n] = fmaf(s[n], scale, values[n]);
}

}  // namespace tilewise::cuda::wgmma
