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

/// Values per head, or per batch entry and head.
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

/// The block mask, ready to be read.
struct BlockView {
  std::int64_t block_q = 0;
  std::int64_t block_k = 0;
  Indices counts, indices, full_counts, full_indices, tile_ids;
  const std::byte* tiles = nullptr;  ///< [tiles, block_q, block_k]
  std::int64_t tile_stride[3] = {};

  constexpr bool tile_shows(std::int32_t tile, std::int64_t i, std::int64_t j) const {
    return tiles[tile * tile_stride[0] + i * tile_stride[1] + j * tile_stride[2]] != std::byte{0};
  }
};

/// What a key block is to a row of query blocks: a tile id from 0 on, or one of these.
inline constexpr std::int32_t block_hidden = -2;
inline constexpr std::int32_t block_full = -1;

/// Keys [first, last).
struct KeyRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
  constexpr bool empty() const { return first >= last; }
};

/// Causal and window as one: the query at position p sees keys p - left up to p + right.
struct Band {
  static constexpr std::int64_t unbounded = std::numeric_limits<std::int64_t>::max() / 4;
  std::int64_t left = unbounded;
  std::int64_t right = unbounded;
  constexpr bool bounded() const { return left < unbounded || right < unbounded; }
};

/// One batch entry or packed sequence.
struct Sequence {
  std::int64_t first_q = 0;  ///< row of its first query in q, o, lse and their gradients
  std::int64_t first_k = 0;
  std::int64_t length_q = 0;
  std::int64_t length_k = 0;
  std::int64_t band_offset = 0;  ///< query i stands at key i + band_offset
};

/// Where a piece stands in its whole; of a call that is a whole, as these are.
struct Place {
  bool of_piece = false;
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  std::int64_t step = 1;
  std::int64_t more_keys = 0;  ///< keys of the whole beyond its queries
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::int64_t heads = 0;  ///< query heads an entry of the whole has

  constexpr std::int64_t query(std::int64_t i) const { return q_offset + i * step; }
  constexpr std::int64_t key(std::int64_t j) const { return k_offset + j * step; }
  /// The number of a head among those of all entries: what dropout counts.
  constexpr std::uint32_t head_index(std::int64_t b, std::int64_t h) const {
    return static_cast<std::uint32_t>((batch_offset + b) * heads + head_offset + h);
  }
};

/// A checked call: the problem, and every argument in the form kernels read. It is passed to CUDA kernels by
/// value, and its small functions are constexpr so that they may be called there.
struct AttentionCall {
  AttentionProblem problem;

  Rows q, k, v, o;
  Rows d_o, dq, dk, dv;  ///< backward
  Rows lse, d_lse;       ///< rows of one element
  MaskView mask, dmask;
  HeadValues alibi_slopes, sinks;
  std::byte* dsinks = nullptr;  ///< [Hq] with stride dsinks_stride, in the type of sinks
  std::int64_t dsinks_stride = 0;

  Indices key_lengths, cumulative_q, cumulative_k, page_table;
  std::int64_t total_q = 0;  ///< rows of packed tensors, which the sequences may leave unused at the end
  std::int64_t total_k = 0;
  std::int64_t page = 0;  ///< keys a page
  BlockView blocks;

  double scale = 1;
  double softcap = 0;
  Band band;
  Alignment alignment = Alignment::top_left;
  DropoutMask dropout;
  bool deterministic = false;
  std::int64_t heads_together = 1;  ///< see group()
  bool allow_tf32 = false;          ///< f32 results need be no better than TF32 products would make them
  Place place;                      ///< read by kernels that take pieces, those of the CPU
  Rows delta;                       ///< of a piece's rows, like lse; not wanted: backward sums it up itself

  /// Query heads that share a key head.
  constexpr std::int64_t group() const { return heads_together; }
  /// The key head of query head h. There are fewer than 2^32, and 32 bits divide faster.
  constexpr std::int64_t key_head(std::int64_t h) const {
    return static_cast<std::uint32_t>(h) / static_cast<std::uint32_t>(heads_together);
  }

  constexpr Sequence sequence(std::int64_t b) const {
    Sequence s{.length_q = problem.length_q, .length_k = problem.length_k};
    if (packed()) {
      s.first_q = cumulative_q.at(b);
      s.first_k = cumulative_k.at(b);
      s.length_q = cumulative_q.at(b + 1) - s.first_q;
      s.length_k = cumulative_k.at(b + 1) - s.first_k;
    }
    if (key_lengths.data != nullptr) s.length_k = key_lengths.at(b);
    if (alignment == Alignment::bottom_right) s.band_offset = s.length_k - s.length_q;
    return s;
  }

  /// Rows of queries or keys a head has over the whole batch, and where those of entry b begin among them:
  /// how kernels index what they keep a row.
  constexpr std::int64_t rows_q() const { return packed() ? total_q : problem.batch * problem.length_q; }
  constexpr std::int64_t rows_k() const { return packed() ? total_k : problem.batch * problem.length_k; }
  constexpr std::int64_t first_row_q(std::int64_t b) const {
    return packed() ? cumulative_q.at(b) : b * problem.length_q;
  }
  constexpr std::int64_t first_row_k(std::int64_t b) const {
    return packed() ? cumulative_k.at(b) : b * problem.length_k;
  }
  constexpr bool packed() const { return problem.layout == Layout::packed; }

  /// The keys that causal, window and lengths leave to query i.
  constexpr KeyRange keys_of(const Sequence& s, std::int64_t i) const {
    const std::int64_t position = i + s.band_offset;
    return {std::max<std::int64_t>(0, position - band.left), std::min(s.length_k, position + band.right + 1)};
  }

  /// How far query i is from key j: what ALiBi multiplies.
  constexpr std::int64_t distance(const Sequence& s, std::int64_t i, std::int64_t j) const {
    const std::int64_t more_keys = place.of_piece ? place.more_keys : s.length_k - s.length_q;
    return place.query(i) + more_keys - place.key(j);
  }

  constexpr std::byte* key_row(const Rows& rows, const Sequence& s, std::int64_t b, std::int64_t h_kv,
                               std::int64_t j) const {
    if (problem.layout == Layout::paged) return rows.at(page_table.at(b, j / page), h_kv, j % page);
    return rows.at(b, h_kv, s.first_k + j);
  }

  constexpr std::int64_t key_blocks() const {
    return (problem.length_k + blocks.block_k - 1) / blocks.block_k;
  }

  /// Fills `states` (one a key block) for query block `qb`.
  void block_states(std::int64_t b, std::int64_t h, std::int64_t qb, std::span<std::int32_t> states) const;
};

}  // namespace tilewise
