#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/call.h"
#include "cuda/attention/common/turns.h"
#include "cuda/attention/sm90/backward/config.h"

namespace tilewise::cuda::wgmma_backward {

/// What the kernels share in the workspace. Rows of queries are padded to whole tiles, so that the values of
/// a tile's rows are one aligned run. Query tiles are counted over [B, Hq, tiles], and those of packed
/// sequences over [Hq, tiles]: each sequence begins with a tile of its own.
struct Workspace {
  /// [query tiles, queries]. P is exp2(S·c − lse) in the plain kernel, whose lse is LSE times log2 e, and
  /// exp2((S − lse)·log2 e + offset) in the general one. +inf for rows that see nothing or are padding.
  float* lse = nullptr;
  float* offset = nullptr;  ///< the same, in the general kernel; 0 but for rows of far_rows()
  float* delta = nullptr;   ///< the same: rowsum(dO ∘ O) − dLSE
  /// [query tiles, dim / 16, queries / 8, 128]: dQ / scale, as wgmma's lanes hold its transpose.
  float* dq = nullptr;
  int tiles = 0;  ///< of a head
  // Where dQ is to be the same in every run, CTAs add to it in the order of their keys.
  std::uint32_t* ticket = nullptr;  ///< CTAs that have begun: they wait for those alone that began before
  std::uint32_t* added = nullptr;   ///< [query tiles, dq_chunks]: how many CTAs have added a warp's part
};

/// Which keys a query sees, and how long sequences are.
struct Sizes {
  int batch, heads_q, heads_kv, group;
  int length_q, length_k;  ///< of packed sequences the longest
  int dim_qk, dim_v;
  std::int64_t left, right;  ///< of the band
  bool bottom_right;
  Indices key_lengths;  ///< [B], or null
  bool packed;
  Starts starts_q, starts_k;  ///< of packed sequences
};

struct DeltaParams {
  Sizes sizes;
  Rows o, d_o, lse, d_lse;
  Rows delta;  ///< of a piece; else it is found here
  Workspace workspace;
  float score_scale;  ///< see exponent_unit()
};

/// How the elements of a mask stand in shared memory.
enum class MaskForm : std::uint8_t { none, boolean, half, single };

/// A block mask by its key blocks: which query blocks see one, the last first.
struct BlockLists {
  int2* lists = nullptr;  ///< [rows, query_blocks]: a query block, and its tile of the mask or block_full
  std::int32_t* counts = nullptr;  ///< [rows]: how many of the list are there
  std::int32_t* states =
      nullptr;  ///< [rows, query_blocks]: the tile, block_full or less; for kernels over pairs
  /// [rows, query_blocks]: how many key blocks before this one the query block sees; where dQ is to be the
  /// same in every run.
  std::int32_t* before = nullptr;
  /// The tiles of the mask, [tiles, query_tiles, key_tiles, 32 keys of a tile, queries of a tile], a bit per
  /// key.
  std::uint32_t* bits = nullptr;
  bool one_row = false;                     ///< all queries of a tile share a row, of bits too: four words
  std::int64_t stride_b = 0, stride_h = 0;  ///< in rows; key blocks are next to each other
  int key_blocks = 0, query_blocks = 0;
  int keys = 1;                        ///< of a block
  int query_tiles = 1, key_tiles = 1;  ///< of a block

  constexpr std::int64_t row(std::int64_t b, std::int64_t h, std::int64_t key_block) const {
    return b * stride_b + h * stride_h + key_block;
  }
  /// The words of a tile of queries and keys.
  constexpr int bit_words(const Config& c) const { return one_row ? 4 : c.kept_words() * c.queries; }
  constexpr const std::uint32_t* bits_of(const Config& c, int tile, int query_tile, int key_tile) const {
    const std::int64_t row = one_row ? tile : std::int64_t{tile} * query_tiles + query_tile % query_tiles;
    return bits + (row * key_tiles + key_tile % key_tiles) * bit_words(c);
  }
};

/// The gradient of a mask, an element for each pair.
struct DmaskParams {
  std::byte* data;  ///< null where it is not wanted, or comes from a kernel over pairs
  DType dtype;
  std::int64_t stride[4];  ///< in bytes
};

/// What scores have beside the scale and the band. For the general kernel.
struct ScoreParams {
  float scale;  ///< with softcap scale / c
  float cap;    ///< c, or 0
  bool alibi;
  HeadValues alibi_slopes;
  MaskForm mask;
  std::uint8_t mask_stages;  ///< of the mask and a block mask's bits
  int mask_rows;  ///< of a box: 64, or 8, the period of the swizzle, if all queries share a row of the mask
  bool dropout;
  int kept_stages;  ///< of dropout's bits: 0, 1 or 2
  DropoutMask kept;
  DmaskParams dmask;
  BlockLists blocks;

  /// Whether tiles may have a mask, or bits of a block mask.
  constexpr bool has_masks() const { return mask != MaskForm::none || blocks.bits != nullptr; }
  constexpr int mask_bytes_log2() const {
    return mask == MaskForm::single ? 2 : mask == MaskForm::half ? 1 : 0;
  }
  /// A stage of the mask in shared memory.
  constexpr int mask_bytes(const Config& c) const {
    return mask == MaskForm::none ? 0 : c.mask_bytes(1 << mask_bytes_log2());
  }
};

struct TileParams {
  CUtensorMap q, k, v, d_o, mask;
  Sizes sizes;
  Rows k_rows, v_rows;  ///< for tiles that end inside the tensor, at a key length or a sequence's end
  Rows dk, dv;
  Workspace workspace;
  Turns turns;
  float scale;
  float dv_scale;  ///< what dropout multiplies kept weights by
  bool wants_dq;
  ScoreParams score;
};

/// How CTAs share out the gradient of a mask: tiles of its elements, of which each has some splits of the
/// pairs that share them. A dimension that the mask is broadcast along counts 1.
struct DmaskJobs {
  int batch, heads, tiles, key_tiles;
  int splits;

  constexpr std::uint32_t per_split() const {
    return static_cast<std::uint32_t>(batch) * static_cast<std::uint32_t>(heads) *
           static_cast<std::uint32_t>(tiles) * static_cast<std::uint32_t>(key_tiles);
  }
};

/// For the kernels over pairs (pairs.cuh).
struct PairParams {
  TileParams tile;
  HeadValues sinks;  ///< without data where there are none
  Rows d_lse;
  MaskView dmask;
  float* partial;     ///< [splits, elements of dmask], or null where there is one split
  bool reloads_mask;  ///< the tiles of a CTA have other parts of the mask
  DmaskJobs jobs;
};

struct DqParams {
  Sizes sizes;
  Rows dq;
  Workspace workspace;
  float scale;
};

struct SinkParams {
  Sizes sizes;
  HeadValues sinks;
  float* dsinks;
  std::int64_t stride;
  Workspace workspace;
};

}  // namespace tilewise::cuda::wgmma_backward
