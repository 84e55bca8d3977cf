#pragma once

#include "cuda/tile/element.cuh"
#include "cuda/wgmma/scores.cuh"

namespace tilewise::cuda::wgmma {

// What a mask adds to a tile's scores, read from memory straight to where scores are, while the tensor cores
// make these. A row's values are in four lanes, 8j + 2t and 8j + 2t + 1 in lane t.

/// In natural units and in the order of scores.
template <ForwardConfig c>
using MaskValues = float[c.masked ? c.keys / 2 : 1];

__device__ __forceinline__ float mask_value(std::byte shown) {
  return shown == std::byte{0} ? minus_infinity : 0.0f;
}
__device__ __forceinline__ float mask_value(float x) { return x; }
__device__ __forceinline__ float mask_value(__half x) { return widen(x); }
__device__ __forceinline__ float mask_value(__nv_bfloat16 x) { return widen(x); }

/// Of four words a lane, word t of lanes 0 to 3 goes to lane t: two exchanges, each of half of the words.
__device__ __forceinline__ void turn_words(std::uint32_t (&words)[4], int lane) {
  const bool upper = (lane & 2) != 0;
  const bool odd = (lane & 1) != 0;
  const std::uint32_t other0 = __shfl_xor_sync(~0u, upper ? words[0] : words[2], 2);
  const std::uint32_t other1 = __shfl_xor_sync(~0u, upper ? words[1] : words[3], 2);
  // Of the lower two lanes, then of the upper two: the two words that this lane or its neighbour wants.
  const std::uint32_t low[2] = {upper ? other0 : words[0], upper ? other1 : words[1]};
  const std::uint32_t high[2] = {upper ? words[2] : other0, upper ? words[3] : other1};
  const std::uint32_t low_other = __shfl_xor_sync(~0u, odd ? low[0] : low[1], 1);
  const std::uint32_t high_other = __shfl_xor_sync(~0u, odd ? high[0] : high[1], 1);
  words[0] = odd ? low_other : low[0];
  words[1] = odd ? low[1] : low_other;
  words[2] = odd ? high_other : high[0];
  words[3] = odd ? high[1] : high_other;
}

/// How a row is read: key by key, two at a time, or eight, which four lanes then exchange. An instruction
/// that reads two in every lane touches eight rows for 16 bytes of each; eight at a time take a seventh less
/// of a call's time for 16-bit elements, but longer for booleans and f32.
enum class MaskSteps { one, two, eight };

template <typename Element>
struct alignas(2 * sizeof(Element)) TwoKeys {
  Element first, second;
};

/// Of one row; `row_gmem` has the tile's first key, of `keys` that there are from it on.
template <ForwardConfig c, typename Element, MaskSteps steps>
  requires(steps != MaskSteps::eight)
__device__ __forceinline__ void read_mask_row(MaskValues<c>& values, int half, const Element* row_gmem,
                                              std::int64_t stride, int keys, int lane) {
  const int own = lane % 4 * 2;
  const Element* first_gmem = row_gmem + own * stride;
#pragma unroll
  for (int j = 0; j < c.keys / 8; ++j) {
    float* const to = &values[4 * j + 2 * half];
    to[0] = to[1] = 0;
    if constexpr (steps == MaskSteps::two) {
      if (8 * j + own < keys) {
        const auto pair = *reinterpret_cast<const TwoKeys<Element>*>(first_gmem + 8 * j);
        to[0] = mask_value(pair.first);
        to[1] = mask_value(pair.second);
      }
    } else {
      if (8 * j + own < keys) to[0] = mask_value(first_gmem[8 * j * stride]);
      if (8 * j + own + 1 < keys) to[1] = mask_value(first_gmem[(8 * j + 1) * stride]);
    }
  }
}

template <ForwardConfig c, typename Element, MaskSteps steps>
  requires(steps == MaskSteps::eight)
__device__ __forceinline__ void read_mask_row(MaskValues<c>& values, int half, const Element* row_gmem,
                                              std::int64_t, int keys, int lane) {
  static_assert(sizeof(Element) == 2);
#pragma unroll
  for (int from = 0; from < c.keys; from += 32) {
    constexpr int eights = 4;
    uint4 read{};
    const int own = from + lane % 4 * 8;
    if (own < std::min(from + 32, c.keys) && own < keys) {
      read = *reinterpret_cast<const uint4*>(row_gmem + own);
    }
    std::uint32_t words[4] = {read.x, read.y, read.z, read.w};
    turn_words(words, lane);
#pragma unroll
    for (int n = 0; n < std::min(eights, (c.keys - from) / 8); ++n) {
      Element pair[2];
      *reinterpret_cast<std::uint32_t*>(pair) = words[n];
      values[(from / 8 + n) * 4 + 2 * half] = mask_value(pair[0]);
      values[(from / 8 + n) * 4 + 2 * half + 1] = mask_value(pair[1]);
    }
  }
}

/// Of a lane's two rows, of which the second may be past the last. Where all rows have the same values, they
/// are read once.
template <ForwardConfig c, typename Element, MaskSteps steps>
__device__ __forceinline__ void read_mask_rows(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                               int row, int rows, int key, int keys, int lane) {
  const auto* first_gmem = reinterpret_cast<const Element*>(mask.data) + b * mask.stride[0] +
                           h * mask.stride[1] + key * mask.stride[3];
  const auto read = [&](int half) {
    read_mask_row<c, Element, steps>(values, half,
                                     first_gmem + min(row + 8 * half, rows - 1) * mask.stride[2],
                                     mask.stride[3], keys - key, lane);
  };
  read(0);
  if (mask.stride[2] != 0) return read(1);
#pragma unroll
  for (int n = 0; n < c.keys / 2; n += 4) {
    values[n + 2] = values[n];
    values[n + 3] = values[n + 1];
  }
}

/// `row` is the lane's row g, `key` the tile's first key; of `rows` and `keys` that there are.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void read_mask(MaskValues<c>& values, const MaskArguments& mask, int b, int h,
                                          int row, int rows, int key, int keys, int lane) {
  const auto read = [&]<typename Element>(Element) {
    mask.in_pairs
        ? read_mask_rows<c, Element, MaskSteps::two>(values, mask, b, h, row, rows, key, keys, lane)
        : read_mask_rows<c, Element, MaskSteps::one>(values, mask, b, h, row, rows, key, keys, lane);
  };
  if (mask.element == MaskArguments::Element::boolean) {
    read(std::byte{});
  } else if (mask.element == MaskArguments::Element::half && mask.in_eights) {
    read_mask_rows<c, T, MaskSteps::eight>(values, mask, b, h, row, rows, key, keys, lane);
  } else if (mask.element == MaskArguments::Element::half) {
    read(T{});
  } else if (mask.element == MaskArguments::Element::single) {
    read(float{});
  } else {
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) values[n] = 0;
  }
}

/// Scores from products, or from what ALiBi made of them with a scale of 1.
template <ForwardConfig c>
__device__ __forceinline__ void add_mask(Scores<c>& s, const MaskValues<c>& values, float scale) {
#pragma unroll
  for (int n = 0; n < c.keys / 2; ++n) s[n] = fmaf(s[n], scale, values[n]);
}

}  // namespace tilewise::cuda::wgmma
