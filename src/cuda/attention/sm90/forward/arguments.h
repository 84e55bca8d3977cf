#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "attention/call.h"
#include "cuda/attention/sm90/forward/schedule.h"
#include "cuda/attention/sm90/forward/tuning.h"

namespace tilewise::cuda::wgmma {

/// Tiles of keys [first, last).
struct TileSpan {
  int first = 0;
  int last = 0;
  constexpr int count() const { return last - first; }
  /// What is in both; count 0 where that is nothing.
  constexpr TileSpan cut(const TileSpan& other) const {
    const TileSpan both{std::max(first, other.first), std::min(last, other.last)};
    return both.first < both.last ? both : TileSpan{};
  }
  /// Share n of so many that are as equal as may be.
  constexpr TileSpan share(int n, int shares) const {
    const auto at = [&](int number) {
      return first + static_cast<int>(static_cast<long long>(count()) * number / shares);
    };
    return at(n) < at(n + 1) ? TileSpan{at(n), at(n + 1)} : TileSpan{};
  }
};

/// The keys that queries see, as the call has it, in 32 bits.
struct BandOfKeys {
  /// Lengths below it and what a band is cut to: sums of three of them fit.
  static constexpr int most = 1 << 29;

  int length_q = 0;
  int length_k = 0;
  int left = 0;  ///< a query at p sees keys p - left up to p + right
  int right = 0;
  int offset = 0;  ///< query i stands at key i + offset

  /// That of entries as long as the problem says: all, or the longest.
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

  /// Tiles of `keys` that each of queries [begin, end), of which there is one, sees all of.
  constexpr TileSpan whole_tiles(int begin, int end, int keys) const {
    return {(first(end - 1) + keys - 1) / keys, std::max(last(begin), 0) / keys};
  }
  /// Tiles of `keys` that any of queries [begin, end) sees something of; count 0 where there are none.
  constexpr TileSpan tiles(int begin, int end, int keys) const {
    if (begin >= end || first(begin) >= last(end - 1)) return {};
    return {first(begin) / keys, (last(end - 1) + keys - 1) / keys};
  }
};

/// What blocks count by where a block that is done takes the next tile: a word of the workspace, and a number
/// that no other launch has.
struct TurnCounter {
  unsigned long long* word = nullptr;
  std::uint32_t owner = 0;
};

/// The part of a product of q and k that tensor cores cut off where others round: on average 1.5e-8 of it for
/// each step of 16 dims (docs/wgmma.md). It matters to lse alone, which is in f32, and to long sums.
inline double cut_off(const AttentionCall& call) {
  const std::int64_t steps = (call.problem.dim_qk + 15) / 16;
  return steps > 8 ? 1.5e-8 * static_cast<double>(steps + 1) : 0.0;
}

/// From the largest score of a row to lse.
struct LseScale {
  float scale = 1;    ///< to natural units
  float rest = 0;     ///< what f32 leaves of it
  float cut_off = 0;  ///< of scores, where these are bare products

  static LseScale of(const AttentionCall& call, bool natural) {
    if (natural) return {};
    const auto rounded = static_cast<float>(call.scale);
    return {.scale = rounded,
            .rest = static_cast<float>(call.scale - static_cast<double>(rounded)),
            .cut_off = static_cast<float>(wgmma::cut_off(call))};
  }
};

/// What calls have that are more than scale, causal and window.
struct GeneralArguments {
  Indices cumulative_q, cumulative_k;  ///< of packed sequences
  Indices key_lengths;
  HeadValues alibi_slopes, sinks;
  Alignment alignment = Alignment::top_left;
  int batch = 0;
  int total_q = 0, total_k = 0;  ///< rows of packed queries and keys
  bool packed = false, softcap = false, alibi = false;
  float cap = 0;
  float score_scale = 1;  ///< with softcap scale / cap, with ALiBi scale; scores are in natural units then

  bool changes_scores() const { return softcap || alibi; }
  static GeneralArguments of(const AttentionCall& call) {
    const AttentionFeatures& features = call.problem.features;
    return {.cumulative_q = call.cumulative_q,
            .cumulative_k = call.cumulative_k,
            .key_lengths = call.key_lengths,
            .alibi_slopes = call.alibi_slopes,
            .sinks = call.sinks,
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

/// How few queries are computed: rows of a tile are those of several heads, and keys are cut into shares.
struct FewArguments {
  int heads_log2 = 0;  ///< of heads that share keys, which stand together: row r is query r >> heads_log2
  int shares = 1;
  Rows o, lse;            ///< of a share, f32, where there are several
  std::int64_t rows = 0;  ///< of a share
};

/// A mask, whose elements come by a map, and dropout.
struct MaskArguments {
  enum class Kind : std::uint8_t { none, boolean, half, single };
  Kind kind = Kind::none;
  int bytes_log2 = 0;     ///< of an element
  float score_scale = 1;  ///< with an additive mask, whose sums with scores are in natural units
  int rows = 64;          ///< of a box: where queries share a mask's row 8, a period of the swizzling
  DropoutMask dropout;

  static int rows_of(const AttentionCall& call) { return call.mask.stride[2] == 0 ? 8 : 64; }
  static MaskArguments of(const AttentionCall& call) {
    const AttentionFeatures& features = call.problem.features;
    MaskArguments found{.dropout = call.dropout};
    found.rows = rows_of(call);
    if (features.mask == MaskKind::boolean) found.kind = Kind::boolean;
    if (features.mask == MaskKind::additive) {
      found.kind = call.mask.dtype == DType::f32 ? Kind::single : Kind::half;
      found.bytes_log2 = found.kind == Kind::single ? 2 : 1;
      found.score_scale = static_cast<float>(call.scale);
    }
    return found;
  }
};

/// What the kernel reads, beside the tensors' maps.
struct ForwardArguments {
  Schedule schedule;
  TurnCounter counter;
  BandOfKeys band;
  int heads = 0;  ///< of queries, or of keys where those that share them stand together
  int group = 1;  ///< such heads that share a key head
  int dim_v = 0;
  float scale_log2 = 1;  ///< of scores: scale·log2 e
  LseScale scale_lse;
  bool aligned_o = false;  ///< rows of o begin at multiples of 16 bytes
  bool mapped_o = false;   ///< there is a map of o
  Rows o, lse;
  GeneralArguments general;
  FewArguments few;
  MaskArguments mask;
};

/// q, k and v as boxes of one panel: 64 queries, or the keys of a tile; o as boxes of a warp's 16 rows.
struct ForwardMaps {
  CUtensorMap q, k, v, o;
};
/// And a mask's, of 64 queries or 8 and up to 128 bytes of a tile's keys.
struct MaskedMaps : ForwardMaps {
  CUtensorMap mask;
};
template <typename Table>
using MapsOf = std::conditional_t<Table::rows[0].masked, MaskedMaps, ForwardMaps>;

}  // namespace tilewise::cuda::wgmma
