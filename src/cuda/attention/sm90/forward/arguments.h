#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "attention/call.h"
#include "cuda/attention/sm90/forward/schedule.h"
#include "cuda/attention/sm90/forward/tuning.h"

namespace tilewise::cuda::wgmma {

/// K tiles [first, last).
struct TileSpan {
  int first = 0;
  int last = 0;
  constexpr int count() const { return last - first; }
  /// The tiles in both spans; count 0 if there are none.
  constexpr TileSpan cut(const TileSpan& other) const {
    const TileSpan both{std::max(first, other.first), std::min(last, other.last)};
    return both.first < both.last ? both : TileSpan{};
  }
  /// Split n of `splits` that are as equal as possible.
  constexpr TileSpan split(int n, int splits) const {
    const auto at = [&](int number) {
      return first + static_cast<int>(static_cast<long long>(count()) * number / splits);
    };
    return at(n) < at(n + 1) ? TileSpan{at(n), at(n + 1)} : TileSpan{};
  }
};

/// The keys that queries see: the call's band, in 32 bits.
struct BandOfKeys {
  /// Lengths are below this and bands are clamped to it, so that sums of three fit 32 bits.
  static constexpr int most = 1 << 29;

  int length_q = 0;
  int length_k = 0;
  int left = 0;  ///< a query at position p sees keys p − left to p + right
  int right = 0;
  int offset = 0;  ///< query i is at position i + offset

  /// The band of entries with the problem's lengths: of all entries, or of the longest.
  static BandOfKeys of(const AttentionCall& call) {
    const auto cut = [](std::int64_t side) {
      return static_cast<int>(std::min<std::int64_t>(side, 2 * std::int64_t{most} - 2));
    };
    BandOfKeys band{.left = cut(call.band.left), .right = cut(call.band.right)};
    band.set_lengths(static_cast<int>(call.problem.length_q), static_cast<int>(call.problem.length_k),
                     call.alignment);
    return band;
  }
  constexpr void set_lengths(int queries, int keys, Alignment alignment) {
    length_q = queries;
    length_k = keys;
    offset = alignment == Alignment::bottom_right ? keys - queries : 0;
  }

  constexpr int first(int query) const { return std::max(0, query + offset - left); }
  constexpr int last(int query) const { return std::min(length_k, query + offset + right + 1); }

  /// Tiles of `keys` keys that all queries of [begin, end), which is not empty, see as a whole.
  constexpr TileSpan whole_tiles(int begin, int end, int keys) const {
    return {(first(end - 1) + keys - 1) / keys, std::max(last(begin), 0) / keys};
  }
  /// Tiles of `keys` keys that some query of [begin, end) sees a key of; count 0 if there are none.
  constexpr TileSpan tiles(int begin, int end, int keys) const {
    if (begin >= end || first(begin) >= last(end - 1)) return {};
    return {first(begin) / keys, (last(end - 1) + keys - 1) / keys};
  }
};

/// The counter from which CTAs draw tile indices, if tiles are scheduled dynamically: a word of the
/// workspace, and a number that no other launch has.
struct TileCounter {
  unsigned long long* word = nullptr;
  std::uint32_t owner = 0;
};

/// The part of Q·Kᵀ that tensor cores truncate where other units round: on average 1.5e-8 of it for each step
/// of 16 dims (docs/wgmma.md). It matters only for LSE, which is in f32, and for long sums.
inline double cut_off(const AttentionCall& call) {
  const std::int64_t steps = (call.problem.dim_qk + 15) / 16;
  return steps > 8 ? 1.5e-8 * static_cast<double>(steps + 1) : 0.0;
}

/// How the largest score of a row is scaled for LSE.
struct LseScale {
  float scale = 1;    ///< to natural units
  float rest = 0;     ///< the rounding error of `scale`
  float cut_off = 0;  ///< see cut_off(), where S is the bare product

  static LseScale of(const AttentionCall& call, bool natural) {
    if (natural) return {};
    const auto rounded = static_cast<float>(call.scale);
    return {.scale = rounded,
            .rest = static_cast<float>(call.scale - static_cast<double>(rounded)),
            .cut_off = static_cast<float>(wgmma::cut_off(call))};
  }
};

/// For calls with more features than scale, causal and window.
struct GeneralArguments {
  Indices cumulative_q, cumulative_k;  ///< of packed sequences
  Indices key_lengths;
  HeadValues alibi_slopes, sinks, logit_scale;
  Alignment alignment = Alignment::top_left;
  int batch = 0;
  int total_q = 0, total_k = 0;  ///< rows of packed queries and keys
  bool packed = false, softcap = false, alibi = false;
  float cap = 0;
  float score_scale = 1;  ///< where scores change: scale, with softcap over cap; S is in natural units then

  /// Whether a score is more than the scaled product.
  constexpr bool changes_scores() const { return softcap || alibi || logit_scale.data != nullptr; }
  static GeneralArguments of(const AttentionCall& call) {
    const AttentionFeatures& features = call.problem.features;
    return {.cumulative_q = call.cumulative_q,
            .cumulative_k = call.cumulative_k,
            .key_lengths = call.key_lengths,
            .alibi_slopes = call.alibi_slopes,
            .sinks = call.sinks,
            .logit_scale = call.logit_scale,
            .alignment = call.alignment,
            .batch = static_cast<int>(call.problem.batch),
            .total_q = static_cast<int>(call.total_q),
            .total_k = static_cast<int>(std::min<std::int64_t>(call.total_k, 0x7fffffff)),
            .packed = call.packed(),
            .softcap = features.softcap,
            .alibi = features.alibi,
            .cap = static_cast<float>(call.softcap),
            .score_scale = static_cast<float>((features.softcap ? call.scale / call.softcap : call.scale) *
                                              (1 + cut_off(call)))};
  }
};

/// For decoding: the rows of a Q tile belong to several heads (packed GQA), and keys are split (split-KV).
struct DecodeArguments {
  int heads_log2 = 0;  ///< of packed heads, which share a KV head: row r is query r >> heads_log2
  int splits = 1;
  Rows o, lse;            ///< partial results of split 0, f32, if there are several splits
  std::int64_t rows = 0;  ///< of a split
};

/// A mask, which is loaded by TMA, and dropout.
struct MaskArguments {
  enum class Kind : std::uint8_t { none, boolean, half, single };
  Kind kind = Kind::none;
  int bytes_log2 = 0;     ///< log2 of an element's bytes
  float score_scale = 1;  ///< with an additive mask, whose sum with S is in natural units
  int rows = 64;          ///< rows of a box: 8, the swizzle's period, if all queries share a row of the mask
  DropoutMask dropout;

  static int rows_of(const AttentionCall& call) { return call.mask.stride[2] == 0 ? 8 : 64; }
  static MaskArguments of(const AttentionCall& call) {
    const AttentionFeatures& features = call.problem.features;
    MaskArguments found{.dropout = call.dropout};
    if (features.mask != MaskKind::none)
      found.rows = rows_of(call);  // otherwise 64, for tiles of block masks
    if (features.mask == MaskKind::boolean) found.kind = Kind::boolean;
    if (features.mask == MaskKind::additive) {
      found.kind = call.mask.dtype == DType::f32 ? Kind::single : Kind::half;
      found.bytes_log2 = found.kind == Kind::single ? 2 : 1;
      // After scale, softcap and ALiBi, S is in natural units already.
      const bool scaled = features.softcap || features.alibi || features.logit_scale;
      found.score_scale = scaled ? 1.0f : static_cast<float>(call.scale * (1 + cut_off(call)));
    }
    return found;
  }
};

/// Padding: keys of an entry that all queries see, or none does. It is either the mask itself, of which
/// `first` is the first element; or a block mask beside another mask, with one block and one row for all
/// queries (`listed`), whose row of an entry and head follows from its lists.
struct PaddingArguments {
  const std::byte* first = nullptr;
  std::int64_t stride_b = 0;  ///< in bytes
  int stride_k = 0;           ///< 1, or 0 if all keys share an element
  bool listed = false;

  constexpr bool given() const { return first != nullptr || listed; }

  static PaddingArguments of(const AttentionCall& call) {
    const AttentionProblem& problem = call.problem;
    if (problem.features.mask == MaskKind::none) return {};
    if (problem.features.block_mask) return {.stride_k = 1, .listed = true};
    if (!problem.key_mask) return {};
    return {.first = call.mask.data,
            .stride_b = call.mask.stride[0],
            .stride_k = static_cast<int>(call.mask.stride[3])};
  }
};

/// A mask whose rows TMA cannot copy in boxes: odd_mask.cuh.
struct OddMask {
  std::uintptr_t data = 0;                                ///< 0: there is none
  std::int64_t stride_b = 0, stride_h = 0, stride_s = 0;  ///< in bytes
  std::uintptr_t first = 0, last = 0;                     ///< all of it is in [first, last)
  int rows = 64;                                          ///< rows of a tile; 1 if all queries share a row
  bool one_key = false;                                   ///< all keys share an element

  constexpr std::uintptr_t address(int b, int h, int row) const {
    return data + static_cast<std::uintptr_t>(b * stride_b + h * stride_h + row * stride_s);
  }
  /// The number of bytes between a row's place in the stage and its first element. 32 bits are enough for
  /// that.
  constexpr std::uint32_t shift(int b, int h, int row) const {
    const auto times = [](int n, std::int64_t stride) {
      return static_cast<std::uint32_t>(n) * static_cast<std::uint32_t>(stride);
    };
    const std::uint32_t low =
        static_cast<std::uint32_t>(data) + times(b, stride_b) + times(h, stride_h) + times(row, stride_s);
    return one_key ? 0 : low % 16;
  }

  static OddMask of(const AttentionCall& call) {
    if (call.problem.features.mask == MaskKind::none || call.problem.aligned_mask) return {};
    const MaskView& mask = call.mask;
    const auto size = static_cast<std::int64_t>(size_of(mask.dtype));
    OddMask found{.data = reinterpret_cast<std::uintptr_t>(mask.data),
                  .stride_b = mask.stride[0] * size,
                  .stride_h = mask.stride[1] * size,
                  .stride_s = mask.stride[2] * size,
                  .rows = mask.stride[2] == 0 ? 1 : 64,
                  .one_key = mask.stride[3] == 0};
    std::int64_t before = 0, behind = size;
    for (int dim = 0; dim < 4; ++dim) {
      const std::int64_t length = (mask.extent[dim] - 1) * mask.stride[dim] * size;
      (length < 0 ? before : behind) += length;
    }
    found.first = found.data + static_cast<std::uintptr_t>(before);
    found.last = found.data + static_cast<std::uintptr_t>(behind);
    return found;
  }
};

/// A block mask. Its Q tiles are inside one row of query blocks and its K tiles inside one key block.
struct BlockArguments {
  BlockView view;
  int queries = 1;     ///< queries of a query block
  int tiles = 1;       ///< K tiles of a key block
  int key_blocks = 0;  ///< key blocks of the mask
  /// Whether the blocks of `view.indices` have tiles that say which pairs are visible; these have a tensor
  /// map.
  bool tiled = false;

  static BlockArguments of(const AttentionCall& call, int keys) {
    const BlockView& view = call.blocks;
    return {.view = view,
            .queries = static_cast<int>(view.block_q),
            .tiles = static_cast<int>((view.block_k + keys - 1) / keys),
            .key_blocks = static_cast<int>(call.key_blocks()),
            .tiled = view.tile_ids.data != nullptr && view.tile_count > 0};
  }
};

/// The kernel's parameters, except the tensor maps.
struct ForwardArguments {
  Schedule schedule;
  TileCounter counter;
  BandOfKeys band;
  int heads = 0;  ///< of Q, a packed group counting as one
  int group = 1;  ///< such heads per KV head
  int dim_v = 0;
  float scale_log2 = 1;  ///< scale · log2 e
  LseScale scale_lse;
  bool aligned_o = false;  ///< rows of O start at multiples of 16 bytes
  bool mapped_o = false;   ///< O has a tensor map
  Rows o, lse;
  GeneralArguments general;
  DecodeArguments decode;
  MaskArguments mask;
  BlockArguments blocks;
  PaddingArguments padding;
};
/// The parameters of rows that are `combined`.
struct CombinedArguments : ForwardArguments {
  OddMask odd;
};
template <bool combined>
using ArgumentsOf = std::conditional_t<combined, CombinedArguments, ForwardArguments>;

/// Tensor maps. A box is a panel of 64 columns: 64 rows of Q, a tile's rows of K and V, a warp's 16 rows of
/// O.
struct ForwardMaps {
  CUtensorMap q, k, v, o;
};
/// Also that of the mask or of a block mask's tiles: boxes of 64 or 8 rows, with up to 128 bytes of a tile's
/// keys.
struct MaskedMaps : ForwardMaps {
  CUtensorMap mask;
};
template <typename Table>
using MapsOf = std::conditional_t<Table::rows[0].mask_tiles(), MaskedMaps, ForwardMaps>;

}  // namespace tilewise::cuda::wgmma
