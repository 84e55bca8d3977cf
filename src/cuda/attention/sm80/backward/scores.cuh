#pragma once

#include "cuda/attention/sm80/backward/block.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda::mma {

// Between a product k·q and its weight: what hides pairs, and in the general kernel all else that makes a
// score. What a call does not have is passed over by all lanes at once; the code for each part is there once
// a pair, in registers.

/// The view of a block's pairs, and where they are: query 8n + 2t + e of the tile, key 16m + 8h + g.
template <typename Block>
using PairView = MmaTransposedView<typename Block::PairSums>;
template <typename Block>
__device__ __forceinline__ int query_of(const Block& block, int first_query, int q) {
  return first_query + 8 * (q / 2) + 2 * (block.lane % 4) + q % 2;
}
template <typename Block>
__device__ __forceinline__ int key_of(const Block& block, int first_key, int k) {
  return first_key + PairView<Block>::step(k) + block.lane / 4;
}

/// Hides what the band hides, and keys past the end.
template <typename Block>
__device__ __forceinline__ void hide(const Block& block, const typename Block::Queries& queries,
                                     int first_query, int first_key, typename Block::PairSums& s) {
  // What has an exponent of minus infinity.
  const float hidden = Block::general || block.unit > 0 ? minus_infinity : -minus_infinity;
  const int own = opaque(first_key + block.lane / 4);
  const int low = opaque(queries.low);
  const int high = opaque(queries.high);
#pragma unroll
  for (int q = 0; q < PairView<Block>::queries; ++q) {
    const int r = query_of(block, first_query, q);
    hide_outside<PairView<Block>>(s, q, r + low - own, min(r + high, block.key_count) - own, hidden);
  }
}

/// Adds what the mask has for each pair. `Element` is its type, or std::byte for a boolean one. Pairs that
/// are not there, which are hidden anyway, meet the last that is.
template <typename Element, typename Block>
__device__ __forceinline__ void add_mask(const Block& block, const typename Block::Queries& queries, int head,
                                         int first_query, int first_key, typename Block::PairSums& s) {
  using View = PairView<Block>;
  const MaskView& mask = block.call.mask;
  const auto* first = reinterpret_cast<const Element*>(mask.data) + block.b * mask.stride[0] +
                      head * mask.stride[1] + queries.first * mask.stride[2] +
                      block.first_key * mask.stride[3];
  std::int64_t column[View::keys];
#pragma unroll
  for (int k = 0; k < View::keys; ++k) {
    const int key = key_of(block, first_key, k);
    column[k] = min(key, block.key_count - 1) * mask.stride[3];
  }
#pragma unroll
  for (int q = 0; q < View::queries; ++q) {
    const int r = query_of(block, first_query, q);
    const Element* row = first + min(r, queries.count - 1) * mask.stride[2];
#pragma unroll
    for (int k = 0; k < View::keys; ++k) {
      float& score = View::at(s, q, k);
      if constexpr (std::is_same_v<Element, std::byte>) {
        if (row[column[k]] == std::byte{0}) score = minus_infinity;
      } else {
        const float bias = widen(row[column[k]]);
        score = bias == minus_infinity ? bias : score + bias;  // whatever the score is
      }
    }
  }
}

/// Scores in natural units from products, in place; the softcap's derivatives go to shared memory.
template <typename Block>
__device__ __forceinline__ void finish_scores(const Block& block, const typename Block::Queries& queries,
                                              const QuerySteps& steps, bool edge, int first_query,
                                              int first_key, typename Block::PairSums& s) {
  using T = typename Block::T;
  const AttentionCall& call = block.call;
  const AttentionFeatures& features = call.problem.features;
  const int head = block.head_of(steps);
  using View = PairView<Block>;
  if (features.softcap) {
    const auto inner = static_cast<float>(call.scale_of(head) / call.softcap);
    const auto cap = static_cast<float>(call.softcap);
    View::each([&](int q, int k) {
      float& score = View::at(s, q, k);
      float& derivative = block.slope_smem(k / 2, q / 2, 2 * (k % 2) + q % 2);
      score = cap * tanh_of(score * inner, derivative);
    });
  } else {
    const auto factor = static_cast<float>(call.scale_of(head));
    View::each([&](int q, int k) { View::at(s, q, k) *= factor; });
  }
  if (features.alibi) {
    const auto slope = static_cast<float>(call.alibi_slopes.at(block.b, head));
    const Sequence sequence = call.sequence(block.b);
    const auto distance =
        static_cast<int>(queries.first + sequence.length_k - sequence.length_q - block.first_key);
    View::each([&](int q, int k) {
      const int r = query_of(block, first_query, q), key = key_of(block, first_key, k);
      View::at(s, q, k) -= slope * static_cast<float>(abs(distance + r - key));
    });
  }
  if (features.mask == MaskKind::boolean) {
    add_mask<std::byte>(block, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive && call.mask.dtype == DType::f32) {
    add_mask<float>(block, queries, head, first_query, first_key, s);
  } else if (features.mask == MaskKind::additive) {
    add_mask<T>(block, queries, head, first_query, first_key, s);
  }
  if (edge) hide(block, queries, first_query, first_key, s);
  if (steps.tile >= 0) {
    const std::int64_t i = queries.first % call.blocks.block_q;
    const std::int64_t j = block.first_key % call.blocks.block_k;
    View::each([&](int q, int k) {
      const int r = query_of(block, first_query, q), key = key_of(block, first_key, k);
      if (r >= queries.count || key >= block.key_count) return;
      if (!call.blocks.tile_shows(steps.tile, i + r, j + key)) View::at(s, q, k) = minus_infinity;
    });
  }
}

/// The bit of a pair among those that dropout keeps.
constexpr unsigned kept_bit(int m, int n, int half, int e) { return 1u << ((2 * n + e) * 4 + 2 * m + half); }

/// Which pairs of a lane dropout keeps. Four keys of a query share a draw, and four lanes have one of them
/// each; so each lane makes a quarter of the draws, and they tell each other.
template <typename Block>
__device__ __forceinline__ unsigned kept_pairs(const Block& block, const typename Block::Queries& queries,
                                               int head, int first_query, int first_key) {
  constexpr int key_eights = 2 * std::extent_v<typename Block::PairSums, 0>;
  constexpr int query_count = 2 * std::extent_v<typename Block::PairSums, 1>;
  static_assert((key_eights == 2 || key_eights == 4) && query_count <= 8 &&
                query_count * key_eights % 4 == 0);
  const AttentionCall& call = block.call;
  const DropoutMask dropout = call.dropout.drawn();
  const auto row = static_cast<std::uint32_t>(block.b * call.problem.heads_q + head);
  const int own = block.lane / 4 % 4;  // which of the four lanes, and of the four keys
  const int i = queries.first + first_query + 2 * (block.lane % 4);
  const int j = block.first_key + first_key + block.lane / 16 * 4;
  const auto query = [&](int q) { return static_cast<std::uint32_t>(i + q / 2 * 8 + q % 2); };
  unsigned kept = 0;
  if (block.first_key % 4 != 0) {  // in a block mask of odd sizes
#pragma unroll 1
    for (int index = 0; index < query_count * key_eights; ++index) {
      const int q = index / key_eights, eight = index % key_eights;
      if (dropout.keeps(row, query(q), static_cast<std::uint32_t>(j + 8 * eight + own))) {
        kept |= 1u << (4 * q + eight);
      }
    }
    return kept;
  }
  constexpr int draws = query_count * key_eights / 4;  // of a lane: those of one eight of keys
  const int eight = own % key_eights;
  const int first = own / key_eights * draws;
  unsigned drawn = 0;
#pragma unroll 1
  for (int n = 0; n < draws; ++n) {
    const KeptFour kept_four =
        draw_four(dropout, static_cast<std::uint32_t>(j + 8 * eight) / 4, query(first + n), row);
    unsigned four = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) four |= kept_four.keeps[word] ? 1u << word : 0u;
    drawn |= four << (4 * n);
  }
#pragma unroll
  for (int other = 0; other < 4; ++other) {
    const unsigned theirs = __shfl_sync(~0u, drawn, block.lane / 16 * 16 + other * 4 + block.lane % 4);
    constexpr unsigned ones = draws == 8 ? 0x11111111u : (1u << (4 * draws % 32)) / 15;
    kept |= ((theirs >> own) & ones) << (other % key_eights + other / key_eights * draws * 4);
  }
  return kept;
}

}  // namespace tilewise::cuda::mma
