#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "attention/dropout.h"
#include "attention/problem.h"
#include "core/rows.h"
#include "tilewise/attention.h"

namespace tilewise {

/// The mask or its gradient over [B, Hq, Sq, Sk]; a broadcast dimension has extent 1 and stride 0.
struct MaskView {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t extent[4] = {};
  std::int64_t stride[4] = {};

  constexpr std::byte* at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t offset = b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
    return data + offset * static_cast<std::int64_t>(size_of(dtype));
  }
};

/// A tensor of values per head, or per batch entry and head.
struct HeadValues {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_b = 0;
  std::int64_t stride_h = 0;

  constexpr double at(std::int64_t b, std::int64_t h) const {
    const std::int64_t index = b * stride_b + h * stride_h;
    return dtype == DType::f64 ? static_cast<const double*>(data)[index]
                               : static_cast<double>(static_cast<const float*>(data)[index]);
  }
};

/// The state of a key block for a row of query blocks: a tile id, which is 0 or above, or one of these.
inline constexpr std::int32_t block_hidden = -2;
inline constexpr std::int32_t block_full = -1;

/// The block mask in the form that kernels read.
struct BlockView {
  std::int64_t block_q = 0;  ///< at most the number of queries, though tiles may have more rows
  std::int64_t block_k = 0;  ///< likewise for keys
  Indices counts, indices, full_counts, full_indices, tile_ids;
  std::int64_t slots = 0, full_slots = 0;  ///< per row of query blocks in `indices` and in `full_indices`
  const std::byte* tiles = nullptr;        ///< [tile_count, block_q, block_k], the caller's
  std::int64_t tile_count = 0;
  std::int64_t tile_stride[3] = {};

  // The next three bring what they read into range, so that a wrong number in a tensor on a GPU never leads
  // outside the lists and the tiles.

  /// The number of blocks that a row of query blocks lists.
  constexpr std::int32_t count(std::int64_t b, std::int64_t h, std::int64_t row) const {
    return static_cast<std::int32_t>(within(counts.at(b, h, row), 0, slots));
  }
  constexpr std::int32_t full_count(std::int64_t b, std::int64_t h, std::int64_t row) const {
    return static_cast<std::int32_t>(within(full_counts.at(b, h, row), 0, full_slots));
  }
  /// The tile of the block at `slot` of a row, or block_full.
  constexpr std::int32_t tile(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t slot) const {
    if (tile_ids.data == nullptr || tile_count == 0) return block_full;
    return static_cast<std::int32_t>(within(tile_ids.at(b, h, row, slot), 0, tile_count - 1));
  }
  constexpr bool tile_shows(std::int32_t tile, std::int64_t i, std::int64_t j) const {
    return tiles[tile * tile_stride[0] + i * tile_stride[1] + j * tile_stride[2]] != std::byte{0};
  }
};

/// Keys [first, last).
struct KeyRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
  constexpr bool empty() const { return first >= last; }
};

/// Causal and window combined: the query at position p sees keys p - left up to p + right.
struct Band {
  static constexpr std::int64_t unbounded = std::numeric_limits<std::int64_t>::max() / 4;
  std::int64_t left = unbounded;
  std::int64_t right = unbounded;
  constexpr bool bounded() const { return left < unbounded || right < unbounded; }
};

/// One batch entry or packed sequence.
struct Sequence {
  std::int64_t first_q = 0;  ///< row of its first query in q, o, LSE and their gradients
  std::int64_t first_k = 0;
  std::int64_t length_q = 0;
  std::int64_t length_k = 0;
  std::int64_t band_offset = 0;  ///< query i stands at key i + band_offset
};

/// The rows of packed sequences, from their cumulative lengths. Numbers are brought into range, so that wrong
/// ones never lead outside the tensor. If they do not increase, sequences may be empty or share rows.
struct Starts {
  Indices cumulative;
  std::int64_t sequences = 0;
  std::int64_t rows = 0;     ///< in the tensor
  std::int64_t longest = 0;  ///< limit of a sequence's length; rows beyond it belong to no sequence

  constexpr std::int64_t at(std::int64_t n) const { return within(cumulative.at(n), 0, rows); }
  constexpr std::int64_t length(std::int64_t n) const { return within(at(n + 1) - at(n), 0, longest); }

  /// Whether the row belongs to the sequence that bisection finds. If the cumulative lengths increase, no
  /// other sequence can have the row. If they do not, another one may have it, and the result may be false
  /// nevertheless; but every row for which it is true belongs to a sequence. Invariant: at(low) <= row <
  /// at(high).
  constexpr bool own(std::int64_t row) const {
    std::int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (at(middle) <= row ? low : high) = middle;
    }
    return low < high && row >= at(low) && row < at(high) && row - at(low) < longest;
  }
};

/// The position of a piece in its whole. The default values are those of a call that is a whole.
struct Place {
  bool of_piece = false;
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  std::int64_t step = 1;
  std::int64_t more_keys = 0;  ///< length_k − length_q of the whole
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::int64_t heads = 0;  ///< query heads of the whole

  constexpr std::int64_t query(std::int64_t i) const { return q_offset + i * step; }
  constexpr std::int64_t key(std::int64_t j) const { return k_offset + j * step; }
  /// The index of a head among those of all entries of the whole, which the dropout counter contains.
  constexpr std::uint32_t head_index(std::int64_t b, std::int64_t h) const {
    return static_cast<std::uint32_t>((batch_offset + b) * heads + head_offset + h);
  }
};

/// A checked call: the problem, and every argument in the form that kernels read. CUDA kernels take it by
/// value, and its small functions are constexpr so that they can be called there.
struct AttentionCall {
  AttentionProblem problem;

  Rows q, k, v, o;
  Rows d_o, dq, dk, dv;  ///< for backward
  Rows lse, d_lse;       ///< as rows of one element
  MaskView mask, dmask;
  HeadValues alibi_slopes, sinks;
  std::byte* dsinks = nullptr;  ///< [Hq] with stride dsinks_stride, in the type of sinks
  std::int64_t dsinks_stride = 0;

  Indices key_lengths, cumulative_q, cumulative_k, page_table;
  std::int64_t total_q = 0;  ///< rows of packed tensors; sequences may leave some at the end unused
  std::int64_t total_k = 0;
  std::int64_t page = 0;         ///< keys per page
  std::int64_t pages = 0;        ///< pages in k and v
  std::int64_t most_length = 0;  ///< limit of key lengths: problem.length_k, or 0 if paged without pages
  BlockView blocks;

  double scale = 1;
  double softcap = 0;
  Band band;
  Alignment alignment = Alignment::top_left;
  DropoutMask dropout;
  bool deterministic = false;
  std::int64_t heads_together = 1;  ///< query heads per key head, see group()
  bool allow_tf32 = false;          ///< f32 results may be as inexact as TF32 products
  Place place;                      ///< read only by kernels that take pieces
  Rows delta;                       ///< of a piece, like LSE; if not given, backward computes it
  HeadValues logit_scale;
  std::byte* dlogit_scale = nullptr;  ///< [Hq] with stride dlogit_scale_stride, in the type of logit_scale
  std::int64_t dlogit_scale_stride = 0;

  /// The factor of q·k for a head: the scale times the head's logit scale.
  constexpr double scale_of(std::int64_t h) const {
    return problem.features.logit_scale ? scale * logit_scale.at(0, h) : scale;
  }

  /// Query heads that share a key head.
  constexpr std::int64_t group() const { return heads_together; }
  /// The key head of query head h. There are fewer than 2^32, and 32 bits divide faster.
  constexpr std::int64_t key_head(std::int64_t h) const {
    return static_cast<std::uint32_t>(h) / static_cast<std::uint32_t>(heads_together);
  }

  constexpr Sequence sequence(std::int64_t b) const {
    Sequence s{.length_q = problem.length_q, .length_k = problem.length_k};
    if (packed()) {
      const Starts of_q = starts_q(), of_k = starts_k();
      s.first_q = of_q.at(b);
      s.first_k = of_k.at(b);
      s.length_q = of_q.length(b);
      s.length_k = of_k.length(b);
    }
    if (key_lengths.data != nullptr) s.length_k = within(key_lengths.at(b), 0, most_length);
    if (alignment == Alignment::bottom_right) s.band_offset = s.length_k - s.length_q;
    return s;
  }

  // Kernels keep their own arrays per row as [heads, rows_q] or [heads, rows_k]: the rows of all entries of
  // one head are adjacent, and those of entry b begin at first_row_q(b) or first_row_k(b).

  constexpr std::int64_t rows_q() const { return packed() ? total_q : problem.batch * problem.length_q; }
  constexpr std::int64_t rows_k() const { return packed() ? total_k : problem.batch * problem.length_k; }
  constexpr std::int64_t first_row_q(std::int64_t b) const {
    return packed() ? starts_q().at(b) : b * problem.length_q;
  }
  constexpr std::int64_t first_row_k(std::int64_t b) const {
    return packed() ? starts_k().at(b) : b * problem.length_k;
  }
  constexpr Starts starts_q() const { return {cumulative_q, problem.batch, total_q, problem.length_q}; }
  constexpr Starts starts_k() const { return {cumulative_k, problem.batch, total_k, problem.length_k}; }
  constexpr bool packed() const { return problem.layout == Layout::packed; }

  /// The keys that causal, window and lengths leave to query i.
  constexpr KeyRange keys_of(const Sequence& s, std::int64_t i) const {
    const std::int64_t position = i + s.band_offset;
    return {std::max<std::int64_t>(0, position - band.left), std::min(s.length_k, position + band.right + 1)};
  }

  /// The signed distance of query i from key j in the whole, which ALiBi multiplies.
  constexpr std::int64_t distance(const Sequence& s, std::int64_t i, std::int64_t j) const {
    const std::int64_t more_keys = place.of_piece ? place.more_keys : s.length_k - s.length_q;
    return place.query(i) + more_keys - place.key(j);
  }

  constexpr std::byte* key_row(const Rows& rows, const Sequence& s, std::int64_t b, std::int64_t h_kv,
                               std::int64_t j) const {
    if (problem.layout == Layout::paged) return rows.at(page_at(b, j / page), h_kv, j % page);
    return rows.at(b, h_kv, s.first_k + j);
  }
  /// The page with an entry's keys from slot · page on, brought into range so that a wrong table never leads
  /// outside the pool.
  constexpr std::int64_t page_at(std::int64_t b, std::int64_t slot) const {
    return within(page_table.at(b, slot), 0, pages - 1);
  }

  constexpr std::int64_t key_blocks() const {
    return (problem.length_k + blocks.block_k - 1) / blocks.block_k;
  }

  /// Fills `states`, one per key block, for query block `qb`.
  void block_states(std::int64_t b, std::int64_t h, std::int64_t qb, std::span<std::int32_t> states) const;
};

/// The call by which kernels choose tiles and splits of a `batch_invariant` call. Its tensors and index
/// tensors are those of the call, whose shapes they no longer fit: it is not for running.
AttentionCall representative(const AttentionCall& call);

/// Calls `choose` with the call by which tiles and splits are chosen: the call itself or, if it is to be
/// batch_invariant, its representative.
template <typename Choose>
auto choosing_by(const AttentionCall& call, const Choose& choose) {
  if (call.problem.batch_invariant) return choose(representative(call));
  return choose(call);
}

}  // namespace tilewise
