#pragma once

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/forward/arguments.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace tilewise::cuda::wgmma {

// S, P and O of a consumer. A lane holds two rows of its warp's 16, g and g + 8, and columns 8j + 2t and
// 8j + 2t + 1 of each. Element 4j + 2h + e is column 8j + 2t + e of row half h (ptx/wgmma.cuh).

template <ForwardConfig c>
using Scores = float[c.keys / 2];
template <ForwardConfig c>
using Output = float[c.dim_v / 2];
/// P as the A operand of P·V, 16 keys per step.
template <ForwardConfig c>
using Probabilities = std::uint32_t[c.keys / 16][4];

/// Starts S = Q·Kᵀ. Both operands are in panels of 64 columns.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void start_scores(Scores<c>& s, TileDescriptor q, TileDescriptor k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  pin(s);
  fence_products();
#pragma unroll
  for (int step = 0; step < c.dim / 16; ++step) {
    const int panel = step / 4;
    const int inside = step % 4 * 2;  // 16 dims are two chunks
    WarpgroupProduct<T, c.keys>::from_shared(s, q + panel * (64 * 128 / 16) + inside,
                                             k + panel * (c.keys * 128 / 16) + inside, step > 0);
  }
  commit_products();
#endif
}

/// Starts O += P·V, or O = P·V where not `add`.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void start_output(Output<c>& o, Probabilities<c>& p, TileDescriptor v, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  pin(o);
  pin(p);
  fence_products();
#pragma unroll
  for (int step = 0; step < c.keys / 16; ++step) {
    WarpgroupProduct<T, c.dim_v>::from_registers(o, p[step], v + step * (16 * 128 / 16), step > 0 || add);
  }
  commit_products();
#endif
}

/// A lane's columns of a row are 0, 1, 8, 9, 16 and so on. Returns a bit for each of 32 of them from the
/// `from`-th on, which is set if the column is before `end`.
__device__ __forceinline__ std::uint32_t columns_before(int end, int from) {
  const int count = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2) - from;
  return count >= 32 ? ~0u : (1u << max(count, 0)) - 1;
}

/// Masks S of row half `half`: an element stays if its bit is set in `shown(from)`, which covers 32 columns.
/// This is not hide_band(): bits become several predicates at once, where comparisons would take an
/// instruction each.
template <ForwardConfig c, int keys, typename Shown>
__device__ __forceinline__ void show(Scores<c>& s, int half, const Shown& shown) {
#pragma unroll
  for (int from = 0; from < keys / 4; from += 32) {
    const std::uint32_t bits = shown(from);
#pragma unroll
    for (int n = from; n < std::min(from + 32, keys / 4); ++n) {
      if ((bits & (1u << (n - from))) == 0) s[n / 2 * 4 + 2 * half + n % 2] = minus_infinity;
    }
  }
}

/// Masks the keys before a row's band, or those after it. `key` is the lane's first key of the tile and `row`
/// the number of row g; with packed heads, `heads_log2` tells how many rows a query has.
template <ForwardConfig c, int keys = c.keys>
__device__ __forceinline__ void hide_before(Scores<c>& s, const BandOfKeys& band, int row, int heads_log2,
                                            int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = band.first((row + 8 * half) >> heads_log2) - key;
    show<c, keys>(s, half, [&](int from) { return ~columns_before(first, from); });
  }
}
template <ForwardConfig c, int keys = c.keys>
__device__ __forceinline__ void hide_after(Scores<c>& s, const BandOfKeys& band, int row, int heads_log2,
                                           int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last = band.last((row + 8 * half) >> heads_log2) - key;
    show<c, keys>(s, half, [&](int from) { return columns_before(last, from); });
  }
}

/// Applies scale, softcap and ALiBi to S of head h; S is in natural units then. `distance` is that of row g
/// from the lane's first key of the tile, for ALiBi.
template <ForwardConfig c>
__device__ __forceinline__ void apply_score_rules(Scores<c>& s, const GeneralArguments& rules, int h,
                                                  float slope, int distance) {
  using View = WgmmaView<c.keys>;
  float scale = rules.score_scale;
  if (rules.logit_scale.data != nullptr) scale *= static_cast<float>(rules.logit_scale.at(0, h));
  scale_and_cap<View>(s, scale, c.softcap() && rules.softcap, rules.cap);
  if (rules.alibi) {
    add_alibi<View>(s, [&](int) { return slope; }, [&](int half) { return distance + 8 * half; });
  }
}

/// Rounds P to T; columns from `keys` on become 0.
template <typename T, ForwardConfig c, int keys = c.keys>
__device__ __forceinline__ void round_p(Probabilities<c>& p, const Scores<c>& s) {
#pragma unroll
  for (int n = 0; n < c.keys / 4; ++n) p[n / 4][n % 4] = n < keys / 4 ? pack<T>(s[2 * n], s[2 * n + 1]) : 0;
}

}  // namespace tilewise::cuda::wgmma
