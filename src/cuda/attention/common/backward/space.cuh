#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/call.h"
#include "core/arena.h"
#include "cuda/attention/common/backward/backward.h"
#include "cuda/attention/common/backward/row_gradients.h"
#include "cuda/attention/common/score.cuh"
#include "cuda/ptx/matrix.cuh"

namespace tilewise::cuda::mma {

// What the kernels of a backward call share in the workspace.

/// One number per query each, [Hq, rows_q].
struct RowValues {
  /// LSE, times log2 e where the kernel is plain; infinite for a query that sees no key.
  float* lse = nullptr;
  float* offset = nullptr;       ///< what the general kernel adds to exponents of 2, see anchor_rows
  float* minus_delta = nullptr;  ///< dLSE − delta
};

/// f16 is less exact below 6e-5, where P and dS often are. So they are scaled by powers of two in f16: P by
/// the constant 2^p_scale_bits, dS by what the largest of dO, V and dLSE allow. bf16 has the range of f32 and
/// needs neither.
struct Largest {
  int d_o = 0;  ///< norm of a row, as the bits of a float; they compare as the numbers do
  int v = 0;
  int d_lse = 0;
  int logit = 0;  ///< a head's logit scale, where the call has logit scales
};
template <typename T>
inline constexpr int p_scale_bits = 0;
template <>
inline constexpr int p_scale_bits<__half> = 14;

/// What dS is multiplied by for the logit scale of a head, and whether that is the scale itself. f16 has no
/// room for dS times a small scale.
struct LogitFactor {
  float factor;
  bool own;
};
template <typename T>
__device__ __forceinline__ LogitFactor logit_factor(const AttentionCall& call, std::int64_t head) {
  const auto logit = static_cast<float>(call.logit_scale.at(0, head));
  const float factor = differentiable(logit, p_scale_bits<T> > 0 ? 0x1p-20f : 0.0f);
  return {factor, factor == logit};
}

/// The power of two by which dS is multiplied, and its inverse.
struct GradientScale {
  float up = 1;
  float down = 1;
};
template <typename T>
__device__ __forceinline__ GradientScale gradient_scale(const Largest* largest, float keep_scale,
                                                        bool logit_scale = false) {
  if constexpr (p_scale_bits<T> == 0) {
    return {};
  } else {
    // |dP − delta| is at most twice the product of the norms of dO and V, times the factor of dropout.
    float bound = fmaf(2 * keep_scale * __int_as_float(largest->d_o), __int_as_float(largest->v),
                       __int_as_float(largest->d_lse));
    if (logit_scale) bound *= fmaxf(1.0f, __int_as_float(largest->logit));
    if (!(bound > 0) || isinf(bound)) return {};
    const int bits = max(-100, min(100, 14 - ilogbf(bound)));  // dS stays below 2^15, half of what f16 holds
    return {exp2f(static_cast<float>(bits)), exp2f(static_cast<float>(-bits))};
  }
}

/// The f32 accumulator of dQ in global memory. It is stored as accumulator fragments of 16 queries by 8 dims,
/// so that a lane adds its four elements at once: [Hq, tiles of 16 queries, eights of dims, 32 lanes, 4].
/// Every sequence, and with a block mask every row of query blocks, starts at a tile of its own.
struct DqAccumulator {
  static constexpr int fragment = 128;
  float* data = nullptr;
  std::int64_t tiles = 0;  ///< per head
  int eights = 0;

  static constexpr std::int64_t run(const AttentionCall& call) {
    return call.problem.features.block_mask ? call.blocks.block_q : call.problem.length_q;
  }
  /// Tiles of one batch entry.
  static constexpr std::int64_t entry_tiles(const AttentionCall& call) {
    const std::int64_t length = std::max<std::int64_t>(run(call), 1);
    return (call.problem.length_q + length - 1) / length * ((length + 15) / 16);
  }
  static std::int64_t tiles_of(const AttentionCall& call) {
    return call.packed() ? call.total_q / 16 + call.problem.batch + 1
                         : call.problem.batch * entry_tiles(call);
  }
  __device__ static std::int64_t first_tile(const AttentionCall& call, std::int64_t b) {
    return call.packed() ? call.cumulative_q.at(b) / 16 + b : b * entry_tiles(call);
  }
  __device__ float* at(std::int64_t head, std::int64_t tile, int eight) const {
    return data + ((head * tiles + tile) * eights + eight) * fragment;
  }
};

/// The order in which CTAs add to dQ where its bits must be the same each time: the CTAs of the K tiles add
/// to a Q tile one after another, and each raises a flag when it is done.
struct Order {
  /// How many CTAs have started. A CTA waits only for those that started before it.
  std::uint32_t* ticket = nullptr;
  /// [Hq, tiles of 16 queries]: how many CTAs have added to the Q tile that starts there.
  std::uint32_t* done = nullptr;
  std::size_t bytes = 0;  ///< of ticket and flags

  constexpr bool kept() const { return ticket != nullptr; }
};

/// Partial dK and dV of CTAs that share a K tile, one row for each of [shares, Hkv, rows_k]. They are summed
/// in the order of the shares.
struct KeyShares {
  int count = 1;
  std::int64_t keys = 0;  ///< rows of a share: Hkv · rows_k
  float* dk = nullptr;    ///< rows of row_floats(dim_qk)
  float* dv = nullptr;

  /// Rows are padded to 16 bytes.
  static constexpr std::int64_t row_floats(std::int64_t dims) { return (dims + 3) / 4 * 4; }
};

/// With a block mask: for each key block, which rows of query blocks list it, as bits. The lists of the mask
/// are by rows of query blocks, so a CTA that keeps a K tile would have to search all of them.
struct SeenBlocks {
  /// [B, Hq, key blocks, words]; null where blocks are so small that this would be larger than Q.
  std::uint32_t* bits = nullptr;
  std::int64_t key_blocks = 0;
  std::int64_t words = 0;
  std::int64_t count = 0;  ///< of all words

  SeenBlocks() = default;
  SeenBlocks(Arena& arena, const AttentionCall& call) {
    const AttentionProblem& problem = call.problem;
    if (!problem.features.block_mask) return;
    key_blocks = (problem.length_k + call.blocks.block_k - 1) / call.blocks.block_k;
    words = (query_blocks(call) + 31) / 32;
    count = problem.batch * problem.heads_q * key_blocks * words;
    if (count * 2 <= problem.heads_q * call.rows_q() * problem.dim_qk)
      bits = arena.take<std::uint32_t>(count);
  }
  static constexpr std::int64_t query_blocks(const AttentionCall& call) {
    return (call.problem.length_q + call.blocks.block_q - 1) / call.blocks.block_q;
  }
  __device__ std::uint32_t* of(const AttentionCall& call, std::int64_t b, std::int64_t hq,
                               std::int64_t key_block) const {
    return bits + ((b * call.problem.heads_q + hq) * key_blocks + key_block) * words;
  }
};

struct BackwardSpace {
  RowValues rows;
  Largest* largest = nullptr;
  DqAccumulator dq;  ///< without the score's scale
  Order order;       ///< null unless the call is deterministic
  KeyShares shares;
  SeenBlocks seen;
  simt::RowStates states{};  ///< for the gradients of mask and sinks, which are exact to f32
  float* row_sums = nullptr;
  float* logit_rows = nullptr;  ///< [Hq, rows_q]: what each query adds to dlogit_scale
  std::size_t bytes = 0;

  BackwardSpace(const AttentionCall& call, void* data, int share_count) {
    Arena arena(data);
    const std::int64_t queries = call.problem.heads_q * call.rows_q();
    const std::int64_t keys = call.problem.heads_kv * call.rows_k();
    rows = {.lse = arena.take<float>(queries),
            .offset = general_backward(call) ? arena.take<float>(queries) : nullptr,
            .minus_delta = arena.take<float>(queries)};
    largest = arena.take<Largest>(1);
    dq.tiles = DqAccumulator::tiles_of(call);
    if (call.dq.wanted) {
      dq.eights = static_cast<int>((call.problem.dim_qk + 7) / 8);
      dq.data = arena.take<float>(call.problem.heads_q * dq.tiles * dq.eights * DqAccumulator::fragment);
    }
    if (call.deterministic && call.dq.wanted) {
      const std::int64_t words = 1 + call.problem.heads_q * dq.tiles;
      auto* first = arena.take<std::uint32_t>(words);
      order = {.ticket = first, .done = first + 1, .bytes = static_cast<std::size_t>(words) * 4};
    }
    shares = {.count = share_count, .keys = keys};
    if (share_count > 1) {
      const std::int64_t count = share_count * keys;
      if (call.dk.wanted) shares.dk = arena.take<float>(count * KeyShares::row_floats(call.problem.dim_qk));
      if (call.dv.wanted) shares.dv = arena.take<float>(count * KeyShares::row_floats(call.problem.dim_v));
    }
    seen = SeenBlocks(arena, call);
    if (needs_states(call)) {
      states = {arena.take<float>(queries), arena.take<float>(queries), arena.take<float>(queries)};
      if (simt::sums_rows(call)) row_sums = arena.take<float>(queries);
    }
    if (call.dlogit_scale != nullptr) logit_rows = arena.take<float>(queries);
    bytes = arena.used();
  }
  static bool needs_states(const AttentionCall& call) {
    return call.problem.features.mask_gradient || call.dsinks != nullptr;
  }
  /// The index of key `s` of K's rows in [Hkv, rows_k].
  __device__ static std::int64_t key_row(const AttentionCall& call, std::int64_t b, std::int64_t h,
                                         std::int64_t s) {
    return h * call.rows_k() + (call.packed() ? s : b * call.problem.length_k + s);
  }
};

}  // namespace tilewise::cuda::mma
