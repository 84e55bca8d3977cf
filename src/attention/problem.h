#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/attention.h"

namespace tilewise {

enum class Layout : std::uint8_t { dense, packed, paged };
enum class MaskKind : std::uint8_t { none, boolean, additive };

/// What may change a score or its gradient.
struct AttentionFeatures {
  MaskKind mask = MaskKind::none;
  bool mask_gradient = false;
  bool causal = false;
  bool window = false;
  bool softcap = false;
  bool alibi = false;
  bool sinks = false;
  bool dropout = false;
  bool key_lengths = false;
  bool block_mask = false;
  bool logit_scale = false;

  /// Whether a score depends on more than scale, band and lengths. Sinks do not count: they join at the end.
  constexpr bool needs_more_than_band() const {
    return mask != MaskKind::none || softcap || alibi || dropout || block_mask || logit_scale;
  }
  friend bool operator==(const AttentionFeatures&, const AttentionFeatures&) = default;
};

/// What backward is asked beyond shapes and features, and how its tensors lie.
struct BackwardDetails {
  bool deterministic = false;
  bool aligned_rows = true;    ///< every row of every tensor of rows begins at a multiple of 16 bytes
  bool ordered_rows = true;    ///< no stride of d_o is negative
  bool repeated_keys = false;  ///< k or v has one row for all keys
  bool summed_dmask = false;   ///< several pairs share an element of the mask, whose gradient is wanted
  std::int64_t elements = 0;   ///< of the smallest of dq, dk and dv
  friend bool operator==(const BackwardDetails&, const BackwardDetails&) = default;
};

/// What a piece asks that no whole problem does.
struct PieceDetails {
  bool placed = false;           ///< ALiBi or dropout count from elsewhere than the first query, key and head
  bool off_diagonal = false;     ///< the band begins after a query's own key, or ends before it
  bool wide_rows = false;        ///< o, dq, dk or dv in f32 of 16-bit rows
  bool wide_statistics = false;  ///< lse, delta and d_lse in f64
  bool share_of_keys = false;    ///< backward by lse and delta of rows that saw other keys too
  friend bool operator==(const PieceDetails&, const PieceDetails&) = default;
};

/// What is asked, apart from how it is done: everything a kernel needs to say whether it can.
struct AttentionProblem {
  Pass pass = Pass::forward;
  Layout layout = Layout::dense;
  Device device{};
  DType dtype = DType::f32;
  std::int64_t batch = 0;  ///< sequences, when packed
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t length_q = 0;  ///< the longest, when packed
  std::int64_t length_k = 0;  ///< the capacity, when paged
  std::int64_t dim_qk = 0;
  std::int64_t dim_v = 0;
  std::int64_t queries = 0;    ///< a head, of all entries together
  std::int64_t keys = 0;       ///< likewise
  std::int64_t most_keys = 0;  ///< that length_k and the band leave to a query
  AttentionFeatures features{};
  bool aligned = false;  ///< rows of q, k and v begin at multiples of 16 bytes, in order of their indices
  bool repeated_values = false;  ///< v has one row for all keys
  bool usual_scale = true;    ///< above 1e-20: products are in the order of their scores, and none overflows
  bool aligned_mask = true;   ///< a mask's rows begin at multiples of 16 bytes, and its keys lie together
  bool f32_mask = false;      ///< the mask is additive, and in f32
  std::int64_t block_q = 0;   ///< queries of a block mask's blocks, or all that there are
  std::int64_t block_k = 0;   ///< likewise of keys
  bool aligned_tiles = true;  ///< as aligned_mask, of the rows of a block mask's tiles
  bool strict = false;        ///< f16 or bf16 is to be as exact as f32 that is rounded at the end
  bool mask_in_rows = true;   ///< a mask's keys lie together, or share an element, wherever its rows begin
  BackwardDetails backward{};
  PieceDetails piece{};
  friend bool operator==(const AttentionProblem&, const AttentionProblem&) = default;
};

/// "forward f32 dense B2 Hq8 Hkv2 Sq128 Sk128 D64 Dv64 on cpu, causal, dropout"
std::string to_string(const AttentionProblem& problem);
/// What a log says before it.
constexpr const char* operation_of(const AttentionProblem&) { return "attention "; }

/// Why a kernel that knows of no pieces cannot take the problem; empty where it can.
std::string unsuited_piece(const AttentionProblem& problem);

}  // namespace tilewise
