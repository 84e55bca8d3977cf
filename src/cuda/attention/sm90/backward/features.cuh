#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/common/score.cuh"
#include "cuda/attention/sm90/backward/shared.cuh"
#include "cuda/attention/sm90/backward/walk.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::wgmma_backward {

// The features of the general kernel: softcap, ALiBi, masks with their gradient and dropout. Block masks,
// which the plain kernel takes, too.
//
// A mask is loaded by TMA, like Q: 64 queries x 128 keys, in swizzled boxes of 128 bytes of keys. Producer
// warps draw dropout's random numbers, so consumers read only a bit per pair.
//
// S and dP are transposed: element 4j + 2h + e of lane 4g + t is that of key g + 8h of the warp's 16 and of
// query 8j + 2t + e.

/// Whether a tile has a mask or bits of a block mask, and its number among the tiles that have any.
template <Config c>
__device__ __forceinline__ bool has_mask(const ScoreParams& score, const Step& step) {
  return score.mask != MaskForm::none || (c.listed && step.block >= 0);
}
template <Config c>
__device__ __forceinline__ int mask_number(const Step& step) {
  return c.listed ? step.masked : step.n;
}

/// The loop over tiles, the same for all roles. The next entry of a list is read before the tiles of the
/// current one, to hide the load's latency.
template <Config c, typename Body>
__device__ __forceinline__ void for_each_tile(const TileParams& params, const Walk& walk, const Body& body) {
  const Sizes& sizes = params.sizes;
  Step step{.block = block_full};
#pragma unroll 1
  for (int head = 0; head < sizes.own_heads; ++head) {
    step.head_q = walk.first_head_q(sizes) + head;
    if constexpr (c.listed) {
      const BlockLists& blocks = params.score.blocks;
      const std::int64_t row = blocks.row(walk.entry.b, step.head_q, walk.first_key / blocks.keys);
      const int2* list = blocks.lists + row * blocks.query_blocks;
      const int count = blocks.counts[row];
      int2 next = count > 0 ? list[0] : int2{};
#pragma unroll 1
      for (int slot = 1; slot <= count; ++slot) {
        const int2 entry = next;
        if (slot < count) next = list[slot];
        const int first = max(walk.first_tile, entry.x * blocks.query_tiles);
        step.block = entry.y;
#pragma unroll 1
        for (int tile = min(walk.end_tile, (entry.x + 1) * blocks.query_tiles) - 1; tile >= first; --tile) {
          step.tile = tile;
          body(step);
          ++step.n;
          if (has_mask<c>(params.score, step)) ++step.masked;
        }
      }
    } else {
#pragma unroll 1
      for (int tile = walk.end_tile - 1; tile >= walk.first_tile; --tile) {
        step.tile = tile;
        body(step);
        ++step.n;
      }
    }
  }
}

/// Stage and parity of item n, with one or two stages.
struct StageOf {
  int stage;
  std::uint32_t parity;
  __device__ StageOf(int n, int stages)
      : stage(n & (stages - 1)), parity(static_cast<std::uint32_t>(n >> (stages - 1)) & 1) {}
};

/// Bytes of a tile's mask, which `barrier` of copy_mask() must expect.
template <Config c>
__device__ __forceinline__ int mask_box_bytes(const ScoreParams& score) {
  return max(c.keys << score.mask_bytes_log2(), 128) * score.mask_rows;
}
/// Starts the copy of a tile's mask, whose first pair is `query` and `key`.
template <Config c>
__device__ __forceinline__ void copy_mask(const TileParams& params, std::byte* to_smem, Mbarrier* barrier,
                                          int key, int query, int head_q, int b) {
  const int bytes_log2 = params.score.mask_bytes_log2();
  for (int bytes = 0; bytes < max(c.keys << bytes_log2, 128); bytes += 128) {
    copy_box(to_smem + bytes * 64, params.mask, barrier, key + (bytes >> bytes_log2), query, head_q, b);
  }
}

/// The stage of a tile's mask and bits.
template <Config c>
__device__ __forceinline__ StageOf mask_place(const ScoreParams& score, const Step& step) {
  return {mask_number<c>(step), score.mask_stages};
}

/// Loads the masks and block masks' bits of all tiles that have any. Called by one thread.
template <Config c>
__device__ void load_masks(const TileParams& params, const Shared<c>& shared, const Walk& walk) {
  const ScoreParams& score = params.score;
  for_each_tile<c>(params, walk, [&](const Step& step) {
    if (!has_mask<c>(score, step)) return;
    const StageOf at = mask_place<c>(score, step);
    Mbarrier* full = shared.mask_full + at.stage;
    wait(shared.mask_empty + at.stage, at.parity ^ 1);
    const bool masked = score.mask != MaskForm::none, listed = c.listed && step.block >= 0;
    const int bit_bytes = listed ? score.blocks.bit_words(c) * 4 : 0;
    arrive_expecting(full, (masked ? mask_box_bytes<c>(score) : 0) + bit_bytes);
    if (masked) {
      copy_mask<c>(params, shared.mask + at.stage * score.mask_bytes(c), full, walk.first_key,
                   step.tile * c.queries, step.head_q, walk.entry.b);
    }
    if (listed) {
      copy_bytes(shared.seen + at.stage * (c.seen_bytes() / 4),
                 score.blocks.bits_of(c, step.block, step.tile, walk.first_key / c.keys), bit_bytes, full);
    }
  });
}

/// The first pair of a tile, in the counters of dropout.
struct DropoutTile {
  int first_key, first_query;
  int head;  ///< number among the query heads of all entries
};

/// Draws dropout's bits of a tile, with `warps` warps. A lane draws eight keys of a query and stores them as
/// a byte. The lane's number and the tile are computed again where they are used, since producers have few
/// registers.
template <Config c, typename Which>
__device__ __forceinline__ void draw_bits(const ScoreParams& score, const volatile Words& words,
                                          std::uint32_t* to_smem, const Which& which, int warp, int warps) {
  constexpr int lanes = c.keys / 8;  // lanes per query
  constexpr int at_once = 32 / lanes, draws = c.draws_at_once;
  auto* bytes = reinterpret_cast<std::uint8_t*>(to_smem);
#pragma unroll 1
  for (int first = warp * at_once; first < c.queries; first += draws * warps * at_once) {
    std::array<std::uint32_t, 4> drawn[draws];
#pragma unroll
    for (int n = 0; n < draws; ++n) {
      const DropoutTile tile = which();
      const int lane = lane_now(), r = first + n * warps * at_once;
      drawn[n] = philox({static_cast<std::uint32_t>(tile.first_key / 8 + lane % lanes),
                         static_cast<std::uint32_t>(tile.first_query + r + lane / lanes),
                         static_cast<std::uint32_t>(tile.head), words.stream},
                        {words.key_low, words.key_high});
    }
#pragma unroll
    for (int n = 0; n < draws; ++n) {
      std::uint32_t bits = 0;
#pragma unroll
      for (int key = 0; key < 8; ++key) {
        bits |= (DropoutMask::half(drawn[n][key % 4], key) >= score.kept.threshold ? 1u : 0u) << key;
      }
      const int lane = lane_now(), chunk = lane % lanes, r = first + n * warps * at_once + lane / lanes;
      bytes[chunk / 4 * c.queries * 4 + r * 4 + chunk % 4] = static_cast<std::uint8_t>(bits);
    }
  }
  __syncwarp();  // all lanes have stored their bytes, and lane 0 signals them
}

/// Draws dropout's bits of all tiles, with `warps` warps.
template <Config c>
__device__ void draw_dropout(const TileParams& params, const Shared<c>& shared, const Walk& walk, int warp,
                             int warps) {
  if (warp == 0) {
    shared.words->first_key = walk.first_key;
    shared.words->first_head = walk.entry.b * params.sizes.heads_q;
  }
  sync_some<words_written, 32 * c.dropout_warps()>();  // the first warp has written the words
  for_each_tile<c>(params, walk, [&](const Step& step) {
    const StageOf at(step.n, params.score.kept_stages);
    wait(shared.kept_empty + at.stage, at.parity ^ 1);
    const auto which = [&]() -> DropoutTile {
      const volatile Words& words = *shared.words;
      return {words.first_key, step.tile * c.queries, words.first_head + step.head_q};
    };
    std::uint32_t* to_smem = shared.kept + at.stage * c.kept_words() * c.queries;
    draw_bits<c>(params.score, *shared.words, to_smem, which, warp, warps);
    if (lane_now() == 0) arrive(shared.kept_full + at.stage);
  });
}

/// The pairs of a tile that a consumer's lane holds.
template <Config c>
struct LanePlace {
  int lane;
  int key;    ///< the warp's first key
  int query;  ///< the consumer's first query

  __device__ LanePlace(int warp, int lane_)
      : lane(lane_),
        key(16 * (c.wide() ? warp % 4 : warp)),
        query(c.wide() ? warp / 4 * c.own_queries() : 0) {}
  /// The lane's first key and query.
  __device__ int first_key() const { return key + lane / 4; }
  __device__ int first_query() const { return query + lane % 4 * 2; }
};

/// The factor that makes S an exponent of 2: scale · log2 e. A scale of 0 becomes a tiny number, which leaves
/// the result as it is but keeps hidden elements of S, ±inf, from becoming NaN.
inline __host__ __device__ float exponent_unit(float scale) {
  const float x = scale * log2e;
  return fabsf(x) < 1e-30f ? 1e-30f : x;
}

/// What a lane needs to compute P of a tile from S.
template <Config c>
struct TileInputs {
  const ScoreParams& score;
  const std::byte* mask_smem;
  const float* lse_smem;     ///< from the lane's first query on
  const float* offset_smem;  ///< the same
  LanePlace<c> place;
  float slope;   ///< ALiBi's slope of the head
  int distance;  ///< ALiBi's i + Sk − Sq − j for the lane's first key and query
  Visible visible;
  int key_count;
  std::uint32_t seen = ~0u;  ///< listed: a bit for each of the lane's pairs: the block mask shows it

  /// Distance in bytes between queries r and r + 8 in the mask's boxes.
  __device__ int eight_rows() const { return score.mask_rows == 64 ? 8 * 128 : 0; }

  /// Loads the mask for elements [8·two, 8·two + 8) of S: 16 queries.
  template <typename T, MaskForm form>
  __device__ __forceinline__ void load_mask(float (&to)[8], int two) const {
    const int lane = place.lane;
    const std::byte* rows = mask_smem + (place.query / 8 + 2 * two) * eight_rows();
    if constexpr (form == MaskForm::half) {
      const std::byte* row = rows + place.key / 64 * 8192 + lane % 8 * 128 + lane / 16 * eight_rows() +
                             ((place.key % 64 / 8 + lane / 8 % 2) ^ (lane % 8)) * 16;
      std::uint32_t words[4];
      load_matrices_transposed(words, static_cast<std::uint32_t>(__cvta_generic_to_shared(row)));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 pair = unpack<T>(words[n]);
        to[2 * n] = pair.x;
        to[2 * n + 1] = pair.y;
      }
    } else {
      const int g = lane / 4;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int row = lane % 4 * 2 + n % 2, half = n / 2 % 2;
        const std::byte* eight = rows + n / 4 * eight_rows() + row * 128;
        if constexpr (form == MaskForm::single) {
          const int chunk = place.key % 32 / 4 + half * 2 + g / 4;
          to[n] =
              *reinterpret_cast<const float*>(eight + place.key / 32 * 8192 + (chunk ^ row) * 16 + g % 4 * 4);
        } else {
          const std::byte seen = eight[((place.key / 16) ^ row) * 16 + half * 8 + g];
          to[n] = seen == std::byte{0} ? minus_infinity : 0.0f;
        }
      }
    }
  }

  /// For a boolean mask whose row all queries share: whether it shows all keys of the warp.
  __device__ __forceinline__ bool shows_all() const {
    const std::byte* row = mask_smem + place.key + place.lane / 4;
    return __all_sync(~0u, row[0] != std::byte{0} && row[8] != std::byte{0});
  }

  __device__ __forceinline__ bool hidden(int j, int e) const {
    const int key = place.first_key() + e / 2 * 8;
    const int r = place.first_query() + 8 * j + e % 2;
    return key < r + visible.low || key >= r + visible.high || key >= key_count;
  }
};

/// Computes P from S: calls take(j, p, slope) for the lane's four pairs among queries [8j, 8j + 8), `slope`
/// being the derivative of softcap. Without `rules` there is neither softcap nor ALiBi. Where rows may be far
/// ones, each step of the score is rounded as in score_of(), which far_rows_kernel uses.
template <typename T, MaskForm form, bool rules, Config c, typename Take>
__device__ __forceinline__ void compute_p_general(float (&s)[c.own_queries() / 2], const TileInputs<c>& tile,
                                                  const Take& take) {
  const ScoreParams& score = tile.score;
  constexpr bool may_be_far = rules || form == MaskForm::half || form == MaskForm::single;
  const float unit = exponent_unit(score.scale);
#pragma unroll
  for (int two = 0; two < c.own_queries() / 16; ++two) {
    float mask[8];
    if constexpr (form != MaskForm::none) tile.template load_mask<T, form>(mask, two);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * two + half;
      float x[4], slope[4] = {1, 1, 1, 1};
      const float2 lse = *reinterpret_cast<const float2*>(tile.lse_smem + 8 * j);
      if constexpr (may_be_far) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __fmul_rn(s[4 * j + e], score.scale);
      } else {
        const float low = -lse.x * log2e, high = -lse.y * log2e;
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fmaf(s[4 * j + e], unit, e % 2 == 0 ? low : high);
      }
      if (rules && score.cap > 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float tangent = tanh_of(x[e]);
          slope[e] = fmaf(-tangent, tangent, 1.0f);
          x[e] = __fmul_rn(tangent, score.cap);
        }
      }
      if (rules && score.alibi) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int distance = tile.distance + 8 * j + e % 2 - e / 2 * 8;
          x[e] = __fadd_rn(x[e], -__fmul_rn(tile.slope, static_cast<float>(abs(distance))));
        }
      }
      if constexpr (form != MaskForm::none) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __fadd_rn(x[e], mask[4 * half + e]);
      }
      if (!tile.visible.all) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (tile.hidden(j, e)) x[e] = minus_infinity;
        }
      }
      if (c.listed && tile.seen != ~0u) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((tile.seen >> (4 * j + e) & 1) == 0) x[e] = minus_infinity;
        }
      }
      if constexpr (may_be_far) {
        const float2 offset = *reinterpret_cast<const float2*>(tile.offset_smem + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = fmaf(x[e] - (e % 2 == 0 ? lse.x : lse.y), log2e, e % 2 == 0 ? offset.x : offset.y);
        }
      }
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = exp2_approx(x[e]);
      take(j, p, slope);
    }
  }
}

/// The same with a mask form that is known at run time.
template <typename T, bool rules, Config c, typename Take>
__device__ __forceinline__ void compute_p_general(MaskForm form, float (&s)[c.own_queries() / 2],
                                                  const TileInputs<c>& tile, const Take& take) {
  if (form == MaskForm::none) {
    compute_p_general<T, MaskForm::none, rules, c>(s, tile, take);
  } else if (form == MaskForm::boolean) {
    compute_p_general<T, MaskForm::boolean, rules, c>(s, tile, take);
  } else if (form == MaskForm::half) {
    compute_p_general<T, MaskForm::half, rules, c>(s, tile, take);
  } else {
    compute_p_general<T, MaskForm::single, rules, c>(s, tile, take);
  }
}

/// Dropout's bits of the lane's four pairs among queries [8j, 8j + 8), where a lane has too many for a word.
template <Config c>
struct KeptFour {
  uint2 queries;
  int first;

  __device__ __forceinline__ KeptFour(const std::uint32_t* kept_smem, const LanePlace<c>& place, int j)
      : queries(*reinterpret_cast<const uint2*>(kept_smem + place.key / 32 * c.queries + place.first_query() +
                                                8 * j)),
        first(place.first_key() % 32) {}
  __device__ __forceinline__ bool at(int e) const {
    return ((e % 2 == 0 ? queries.x : queries.y) >> (first + e / 2 * 8) & 1) != 0;
  }
};

/// Dropout's bits of the pairs that a lane holds, in the order of its elements.
template <Config c>
__device__ __forceinline__ std::uint32_t kept_pairs(const std::uint32_t* kept_smem,
                                                    const LanePlace<c>& place) {
  static_assert(c.own_queries() / 2 <= 32);
  const std::uint32_t* words = kept_smem + place.key / 32 * c.queries + place.first_query();
  const int first = place.first_key() % 32;
  std::uint32_t kept = 0;
#pragma unroll
  for (int j = 0; j < c.own_queries() / 8; ++j) {
    const uint2 queries = *reinterpret_cast<const uint2*>(words + 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      kept |= ((e % 2 == 0 ? queries.x : queries.y) >> (first + e / 2 * 8) & 1) << (4 * j + e);
    }
  }
  return kept;
}

/// The same of a block mask's bits.
template <Config c>
__device__ __forceinline__ std::uint32_t seen_pairs(const BlockLists& blocks, const std::uint32_t* seen_smem,
                                                    const LanePlace<c>& place) {
  if (!blocks.one_row) return kept_pairs<c>(seen_smem, place);
  const std::uint32_t keys = seen_smem[place.key / 32] >> place.first_key() % 32;
  return ((keys & 1) * 3 | (keys >> 8 & 1) * 12) * 0x11111111u;
}

/// Calls take(n, bit) for each of the lane's pairs, with a block mask's bit of it. It has words in registers
/// for eight queries at a time, and a lane may have more than 32 pairs.
template <Config c, typename Take>
__device__ __forceinline__ void for_each_seen_word(const BlockLists& blocks, const std::uint32_t* seen_smem,
                                                   const LanePlace<c>& place, const Take& take) {
  const int first = place.first_key() % 32;
  const std::uint32_t* words = seen_smem + place.key / 32 * (blocks.one_row ? 1 : c.queries) +
                               (blocks.one_row ? 0 : place.first_query());
#pragma unroll
  for (int j = 0; j < c.own_queries() / 8; ++j) {
    const uint2 queries =
        blocks.one_row ? uint2{words[0], words[0]} : *reinterpret_cast<const uint2*>(words + 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      take(4 * j + e, ((e % 2 == 0 ? queries.x : queries.y) >> (first + e / 2 * 8) & 1) != 0);
    }
  }
}

/// Stores the mask's gradient: dS before rounding.
struct MaskGradient {
  const DmaskParams& params;
  std::byte* first;   ///< the element of the lane's first key and query
  int keys, queries;  ///< number of keys and queries from these up to the ends of the sequence

  template <Config c>
  __device__ MaskGradient(const DmaskParams& params_, const Walk& walk, int head_q, int tile_query,
                          const LanePlace<c>& place)
      : params(params_) {
    const int key = place.first_key(), query = tile_query + place.first_query();
    first = params.data + walk.entry.b * params.stride[0] + head_q * params.stride[1] +
            query * params.stride[2] + (walk.first_key + key) * params.stride[3];
    keys = walk.key_count - key;
    queries = walk.entry.length_q - query;
  }
  __device__ __forceinline__ void put(int key, int query, float ds) const {
    store_element(first + key * params.stride[3] + query * params.stride[2], params.dtype, ds);
  }
};

/// Computes dS from P times the derivative of softcap, and dP, which is 0 for dropped pairs; rounds it.
/// `delta_smem` is delta from the lane's first query on. Also stores the mask's gradient if `wants_dmask`.
template <typename T, bool wants_dmask, bool drops, Config c>
__device__ __forceinline__ void compute_ds_general(std::uint32_t (&ds)[c.own_queries() / 16][4],
                                                   const float (&p)[c.own_queries() / 2],
                                                   const float (&dp)[c.own_queries() / 2],
                                                   const float* delta_smem, std::uint32_t kept,
                                                   float keep_scale, const MaskGradient& dmask, int lane) {
#pragma unroll
  for (int j = 0; j < c.own_queries() / 8; ++j) {
    const float2 delta = *reinterpret_cast<const float2*>(delta_smem + 8 * j);
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float minus_delta = e % 2 == 0 ? -delta.x : -delta.y;
      const float own = drops && (kept >> (4 * j + e) & 1) == 0 ? 0.0f : dp[4 * j + e];
      x[e] = p[4 * j + e] * (drops ? fmaf(own, keep_scale, minus_delta) : own + minus_delta);
    }
    if constexpr (wants_dmask) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = 8 * j + e % 2;
        if (8 * (e / 2) >= dmask.keys || query >= dmask.queries) continue;
        dmask.put(8 * (e / 2), query, x[e]);
      }
    }
    ds[j / 2][j % 2 * 2] = pack<T>(x[0], x[1]);
    ds[j / 2][j % 2 * 2 + 1] = pack<T>(x[2], x[3]);
  }
}

}  // namespace tilewise::cuda::wgmma_backward
