#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"
#include "cuda/attention/common/turns.h"
#include "cuda/attention/sm90/backward/config.h"
#include "cuda/attention/sm90/backward/splits.h"

namespace tilewise::cuda::wgmma_backward {

/// Arrays in the workspace through which the kernels pass data. Rows of queries are padded to whole tiles, so
/// that the values of a tile's rows are one aligned run. Query tiles are numbered over [B, Hq, tiles], or
/// over [Hq, tiles] for packed sequences, each of which starts with a tile of its own.
struct Workspace {
  /// [query tiles, queries]. The plain kernel stores LSE·log2 e, so that P = exp2(S·c − lse), or with
  /// `preload` −LSE in the unit of S. In the general kernel P = exp2((S − lse)·log2 e + offset). Empty rows
  /// and padding have the infinity that makes P 0.
  float* lse = nullptr;
  float* offset = nullptr;  ///< [query tiles, queries], general kernel; 0 except in far rows (far_rows.cuh)
  float* delta = nullptr;   ///< [query tiles, queries]: rowsum(dO ∘ O) − dLSE
  /// [query tiles, dim / 16, queries / 8, 128]: dQ / scale, in the order in which wgmma's lanes hold dQᵀ.
  float* dq = nullptr;
  int tiles = 0;  ///< query tiles per head
  /// With splits, [entries, Hkv, splits, rows of keys, dims]: each split's dK and dV.
  float* dk = nullptr;
  float* dv = nullptr;
  // For a deterministic dQ, CTAs add to it in the order of their keys.
  /// The number of CTAs that have started: a CTA waits only for those that started before it.
  std::uint32_t* ticket = nullptr;
  std::uint32_t* added = nullptr;  ///< [query tiles, dq_chunks]: number of CTAs that have added to the part
};

/// Sizes of the tensors, and what decides which keys a query sees.
struct Sizes {
  int batch, heads_q, heads_kv, group;
  Splits splits;
  int length_q, length_k;  ///< of the longest sequence, if packed
  int dim_qk, dim_v;
  std::int64_t left, right;  ///< width of the band
  bool bottom_right;
  Indices key_lengths;  ///< [B], or null
  bool packed;
  Starts starts_q, starts_k;  ///< of packed sequences
  int own_heads;              ///< query heads of a CTA
};

/// Padding: a boolean mask of which all queries and heads of an entry share a row. Data is null without one.
struct KeyMask {
  const std::byte* data = nullptr;
  std::int64_t stride_b = 0, stride_k = 0;

  constexpr bool shows(std::int64_t b, std::int64_t key) const {
    return data[b * stride_b + key * stride_k] != std::byte{0};
  }
};

struct DeltaParams {
  Sizes sizes;
  Rows o, d_o, lse, d_lse;
  Rows delta;  ///< given for a piece of a whole; otherwise computed from O and dO
  Workspace workspace;
  float score_scale;  ///< see exponent_unit()
};

/// The type of a mask's elements in shared memory.
enum class MaskForm : std::uint8_t { none, boolean, half, single };

/// A block mask by key blocks: the lists of query blocks that see a key block, from the last to the first.
struct BlockLists {
  int2* lists = nullptr;  ///< [rows, query_blocks]: a query block, and its tile of the mask or block_full
  std::int32_t* counts = nullptr;  ///< [rows]: length of each list
  /// [rows, query_blocks], for the pair kernels: the tile of the mask, block_full, or less where it is
  /// hidden.
  std::int32_t* states = nullptr;
  /// [rows, query_blocks], for a deterministic dQ: the number of earlier key blocks that the query block
  /// sees.
  std::int32_t* before = nullptr;
  /// The tiles of the mask, [tiles, query_tiles, key_tiles, kept_words, queries of a tile], one bit per key.
  std::uint32_t* bits = nullptr;
  bool one_row = false;                     ///< all queries of a mask's tile share one row of four words
  std::int64_t stride_b = 0, stride_h = 0;  ///< in rows; a row is a key block
  int key_blocks = 0, query_blocks = 0;
  int keys = 1;                        ///< keys of a block
  int query_tiles = 1, key_tiles = 1;  ///< the kernel's tiles per block

  constexpr std::int64_t row(std::int64_t b, std::int64_t h, std::int64_t key_block) const {
    return b * stride_b + h * stride_h + key_block;
  }
  /// The number of words for a tile of queries and keys.
  constexpr int bit_words(const Config& c) const { return one_row ? 4 : c.kept_words() * c.queries; }
  constexpr const std::uint32_t* bits_of(const Config& c, int tile, int query_tile, int key_tile) const {
    const std::int64_t row = one_row ? tile : std::int64_t{tile} * query_tiles + query_tile % query_tiles;
    return bits + (row * key_tiles + key_tile % key_tiles) * bit_words(c);
  }
};

/// The gradient of a mask that has an element for each pair.
struct DmaskParams {
  std::byte* data;  ///< null where it is not wanted, or where a pair kernel computes it
  DType dtype;
  std::int64_t stride[4];  ///< in bytes
};

/// The score rules and masks of the general kernel, except the scale and the band.
struct ScoreParams {
  float scale;  ///< scale, or scale / c with softcap
  float cap;    ///< c of softcap, or 0
  bool alibi;
  HeadValues alibi_slopes;
  MaskForm mask;
  std::uint8_t mask_stages;  ///< stages of the mask and a block mask's bits
  int mask_rows;  ///< rows of a box: 64, or 8 (the swizzle's period) if all queries share a row of the mask
  bool dropout;
  int kept_stages;  ///< stages of dropout's bits: 0, 1 or 2
  DropoutMask kept;
  DmaskParams dmask;
  BlockLists blocks;

  constexpr bool has_rules() const { return cap > 0 || alibi; }
  /// Whether a tile may have a mask or bits of a block mask.
  constexpr bool has_masks() const { return mask != MaskForm::none || blocks.bits != nullptr; }
  constexpr int mask_bytes_log2() const {
    return mask == MaskForm::single ? 2 : mask == MaskForm::half ? 1 : 0;
  }
  /// Bytes of a stage of the mask.
  constexpr int mask_bytes(const Config& c) const {
    return mask == MaskForm::none ? 0 : c.mask_bytes(1 << mask_bytes_log2());
  }
};

struct TileParams {
  CUtensorMap q, k, v, d_o, mask;
  Sizes sizes;
  KeyMask key_mask;     ///< of the plain kernel
  Rows k_rows, v_rows;  ///< for tiles that end at a key length or a sequence's end, which TMA does not know
  Rows dk, dv;
  Workspace workspace;
  Turns turns;
  float scale;
  float dv_scale;  ///< the factor of the elements of P that dropout keeps
  bool wants_dq;
  ScoreParams score;
};

/// The grid of the pair kernel for dmask: tiles of dmask, and splits of the pairs that share a tile's
/// elements. A dimension along which the mask is broadcast counts as 1.
struct DmaskJobs {
  int batch, heads, tiles, key_tiles;
  int splits;

  constexpr std::uint32_t per_split() const {
    return static_cast<std::uint32_t>(batch) * static_cast<std::uint32_t>(heads) *
           static_cast<std::uint32_t>(tiles) * static_cast<std::uint32_t>(key_tiles);
  }
};

/// Parameters of the pair kernels (pairs.cuh).
struct PairParams {
  TileParams tile;
  HeadValues sinks;  ///< without data where there are none
  Rows d_lse;
  MaskView dmask;
  float* partial;     ///< [splits, elements of dmask], or null where there is one split
  bool reloads_mask;  ///< the tiles of a CTA have different parts of the mask
  DmaskJobs jobs;
};

struct DqParams {
  Sizes sizes;
  Rows dq;
  Workspace workspace;
  float scale;
};

/// Parameters of the kernel that adds the splits' dK and dV.
struct JoinParams {
  std::int64_t heads, rows;  ///< heads of all entries
  int heads_kv, splits;
  int dim_qk, dim_v;
  Rows dk, dv;
  const float* split_dk;
  const float* split_dv;
};

struct SinkParams {
  Sizes sizes;
  float unit;  ///< see exponent_unit()
  HeadValues sinks;
  float* dsinks;
  std::int64_t stride;
  Workspace workspace;
};

}  // namespace tilewise::cuda::wgmma_backward
