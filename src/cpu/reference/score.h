#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "attention/call.h"
#include "core/load.h"

namespace tilewise::cpu::reference {

template <typename T>
double widen(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return static_cast<double>(static_cast<float>(value));
  }
}

/// Calls body with a value of the C++ type of a floating dtype.
template <typename Body>
auto with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f64: return body(double{});
    case DType::f16: return body(f16{});
    case DType::bf16: return body(bf16{});
    default: return body(float{});
  }
}

/// Σ a[d]·b[d] in f64, over rows of one type. Eight independent sums hide the latency of the additions.
inline double dot(DType dtype, const std::byte* a_bytes, const std::byte* b_bytes, std::int64_t dim) {
  return with_type(dtype, [&]<typename T>(T) {
    const T* a = reinterpret_cast<const T*>(a_bytes);
    const T* b = reinterpret_cast<const T*>(b_bytes);
    double sum[8] = {};
    std::int64_t d = 0;
    for (; d + 8 <= dim; d += 8) {
      for (int n = 0; n < 8; ++n) sum[n] += widen(a[d + n]) * widen(b[d + n]);
    }
    for (; d < dim; ++d) sum[d % 8] += widen(a[d]) * widen(b[d]);
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
  });
}

/// sum[d] += factor·row[d]
inline void add_scaled(double* sum, double factor, DType dtype, const std::byte* row_bytes,
                       std::int64_t dim) {
  with_type(dtype, [&]<typename T>(T) {
    const T* row = reinterpret_cast<const T*>(row_bytes);
    for (std::int64_t d = 0; d < dim; ++d) sum[d] += factor * widen(row[d]);
  });
}

inline void store_row(std::byte* row_bytes, DType dtype, const double* values, double factor,
                      std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; ++d) store_element(row_bytes, dtype, d, factor * values[d]);
}

/// One query: entry b, query head h, position i.
struct Query {
  const AttentionCall& call;
  std::int64_t b, h, i;
  Sequence sequence = call.sequence(b);

  std::int64_t kv_head() const { return call.key_head(h); }
  std::byte* row(const Rows& rows) const { return rows.at(b, h, sequence.first_q + i); }
  std::byte* key_row(const Rows& rows, std::int64_t j) const {
    return call.key_row(rows, sequence, b, kv_head(), j);
  }

  /// Whether anything hides key j from this query. Keys from sequence.length_k on do not exist.
  bool sees(std::int64_t j) const {
    const KeyRange keys = call.keys_of(sequence, i);
    if (j < keys.first || j >= keys.last) return false;
    if (call.problem.features.mask == MaskKind::boolean && *call.mask.at(b, h, i, j) == std::byte{0})
      return false;
    return !call.problem.features.block_mask || block_shows(j);
  }

  /// q·k.
  double dot_with(std::int64_t j) const {
    return dot(call.q.dtype, row(call.q), key_row(call.k, j), call.problem.dim_qk);
  }
  /// scale · logit scale · q·k, the score before softcap.
  double scaled_dot(std::int64_t j) const { return call.scale_of(h) * dot_with(j); }

  /// The score of key j; −inf when it is hidden.
  double score(std::int64_t j) const {
    if (!sees(j)) return -std::numeric_limits<double>::infinity();
    const AttentionFeatures& features = call.problem.features;
    double s = scaled_dot(j);
    if (features.softcap) s = call.softcap * std::tanh(s / call.softcap);
    if (features.alibi) {
      const std::int64_t distance = call.distance(sequence, i, j);
      s -= call.alibi_slopes.at(b, h) * std::abs(static_cast<double>(distance));
    }
    if (features.mask == MaskKind::additive) s += load_element(call.mask.at(b, h, i, j), call.mask.dtype, 0);
    return s;
  }

  /// The derivative of the score with respect to scaled_dot(j): 1 without softcap.
  double softcap_derivative(std::int64_t j) const {
    if (!call.problem.features.softcap) return 1;
    const double t = std::tanh(scaled_dot(j) / call.softcap);
    return 1 - t * t;
  }

  /// The factor by which dropout multiplies P: 0 for a dropped key, 1 / (1 − probability) for a kept one.
  double dropout_factor(std::int64_t j) const {
    if (!call.problem.features.dropout) return 1;
    const Place& place = call.place;
    const bool kept = call.dropout.keeps(place.head_index(b, h), static_cast<std::uint32_t>(place.query(i)),
                                         static_cast<std::uint32_t>(place.key(j)));
    return kept ? static_cast<double>(call.dropout.keep_scale) : 0.0;
  }

 private:
  bool block_shows(std::int64_t j) const {
    const BlockView& blocks = call.blocks;
    const std::int64_t qb = i / blocks.block_q;
    const std::int64_t kb = j / blocks.block_k;
    if (blocks.full_counts.data != nullptr) {
      for (std::int32_t slot = 0; slot < blocks.full_counts.at(b, h, qb); ++slot) {
        if (blocks.full_indices.at(b, h, qb, slot) == kb) return true;
      }
    }
    bool shown = false;
    for (std::int32_t slot = 0; slot < blocks.counts.at(b, h, qb); ++slot) {
      if (blocks.indices.at(b, h, qb, slot) != kb) continue;
      shown = blocks.tiles == nullptr ||
              blocks.tile_shows(blocks.tile_ids.at(b, h, qb, slot), i % blocks.block_q, j % blocks.block_k);
    }
    return shown;
  }
};

}  // namespace tilewise::cpu::reference
