#pragma once

#include <cstdint>
#include <string>

#include "core/pass.h"
#include "tilewise/attention.h"

namespace tilewise {

enum class Layout : std::uint8_t { dense, packed, paged };
enum class MaskKind : std::uint8_t { none, boolean, additive };

/// The features that change a score or its gradient.
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

  /// Whether P depends on more than scale, band and lengths. Sinks do not count, since they join after the
  /// last key.
  constexpr bool needs_more_than_band() const {
    return mask != MaskKind::none || softcap || alibi || dropout || block_mask || logit_scale;
  }
  friend bool operator==(const AttentionFeatures&, const AttentionFeatures&) = default;
};

/// What only backward is asked, and the memory layout of its tensors.
struct BackwardDetails {
  bool deterministic = false;
  bool aligned_rows = true;  ///< each row of q, k, v, o and their gradients begins at a multiple of 16 bytes
  bool ordered_rows = true;  ///< no stride of d_o is negative
  bool repeated_keys = false;  ///< k or v has one row for all keys (stride 0)
  bool summed_dmask = false;   ///< dmask is wanted and sums over broadcast dimensions
  std::int64_t elements = 0;   ///< number of elements of the smallest of dq, dk and dv
  friend bool operator==(const BackwardDetails&, const BackwardDetails&) = default;
};

/// What only a piece can ask.
struct PieceDetails {
  bool placed = false;  ///< ALiBi or dropout do not count from the first query, key and head of the call
  bool off_diagonal = false;     ///< the band does not contain a query's own key
  bool wide_rows = false;        ///< o, dq, dk or dv is f32 while the inputs are f16 or bf16
  bool wide_statistics = false;  ///< LSE, delta and dLSE are f64
  bool share_of_keys = false;    ///< backward with some of the keys, from LSE and delta of whole rows
  friend bool operator==(const PieceDetails&, const PieceDetails&) = default;
};

/// What is asked, apart from how it is computed: everything a kernel needs to say whether it can compute it.
struct AttentionProblem {
  Pass pass = Pass::forward;
  Layout layout = Layout::dense;
  Device device{};
  DType dtype = DType::f32;
  std::int64_t batch = 0;  ///< batch entries, or packed sequences
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t length_q = 0;  ///< of the longest sequence, when packed
  std::int64_t length_k = 0;  ///< the capacity, when paged
  std::int64_t dim_qk = 0;
  std::int64_t dim_v = 0;
  std::int64_t queries = 0;    ///< per head, in all entries together
  std::int64_t keys = 0;       ///< likewise
  std::int64_t most_keys = 0;  ///< the most keys that a query sees by length_k and the band
  AttentionFeatures features{};
  bool aligned = false;  ///< rows of q, k and v begin at multiples of 16 bytes, and no stride is negative
  bool repeated_values = false;  ///< v has one row for all keys (stride 0)
  /// The scale is at least 1e-20, so that q·k and the scores have the same order and none of them overflows.
  bool usual_scale = true;
  bool aligned_mask = true;   ///< a mask's rows begin at multiples of 16 bytes and are contiguous
  bool f32_mask = false;      ///< the mask is additive and f32
  bool key_mask = false;      ///< the mask is boolean, and all queries and heads of an entry share its row
  std::int64_t block_q = 0;   ///< of a block mask, at most length_q
  std::int64_t block_k = 0;   ///< likewise, at most length_k
  bool aligned_tiles = true;  ///< like aligned_mask, for the rows of a block mask's tiles
  bool key_blocks = false;    ///< the block mask is one block, of which all queries share a row (padding)
  bool strict = false;        ///< f16 or bf16 must be as exact as f32 that is rounded at the end
  bool mask_in_rows = true;   ///< a mask's rows are contiguous or broadcast over the keys, with any alignment
  bool batch_invariant = false;  ///< the bits of a sequence may not depend on the others
  BackwardDetails backward{};
  PieceDetails piece{};
  friend bool operator==(const AttentionProblem&, const AttentionProblem&) = default;
};

/// With `batch_invariant`, kernels, tiles and splits are chosen as for this problem, which has of the
/// caller's what a sequence has by itself: heads, dims, types, options and, where all entries share it, the
/// number of queries. Calls with key lengths count as a few caches of usual length, so that their keys are
/// split, and all others as many usual sequences. Block masks keep their lengths. The result is not
/// batch_invariant.
AttentionProblem representative(const AttentionProblem& problem);

/// Lengths of a representative problem.
inline constexpr std::int64_t usual_length = 4096;
inline constexpr std::int64_t usual_cache = 8192;

/// Whether the keys of a problem are a cache: then the host knows only its capacity.
constexpr bool has_cache(const AttentionProblem& problem) {
  return problem.layout == Layout::paged || problem.features.key_lengths;
}
/// The number of queries by which tiles are chosen.
constexpr std::int64_t choice_length_q(const AttentionProblem& problem) {
  const bool usual =
      problem.batch_invariant && !has_cache(problem) && !problem.features.block_mask && problem.length_q > 0;
  return usual ? usual_length : problem.length_q;
}

/// "forward f32 dense B2 Hq8 Hkv2 Sq128 Sk128 D64 Dv64 on cpu, causal, dropout"
std::string to_string(const AttentionProblem& problem);
/// The name of the operation, which precedes the problem in logs.
constexpr const char* operation_of(const AttentionProblem&) { return "attention "; }

/// Why a kernel without support for pieces cannot compute the problem; empty if it can.
std::string unsuited_piece(const AttentionProblem& problem);

}  // namespace tilewise
