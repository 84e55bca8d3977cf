// Transposes between rows in memory, one per query, and panels, which have one query per lane.

#if defined(TILEWISE_CPU_SIMD_TRANSPOSE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_TRANSPOSE_INL_H
#undef TILEWISE_CPU_SIMD_TRANSPOSE_INL_H
#else
#define TILEWISE_CPU_SIMD_TRANSPOSE_INL_H
#endif

#include <cstring>

#include "cpu/simd/panel.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

using F4 = hn::FixedTag<float, 4>;

/// to[c·to_stride + r] = from[r·from_stride + c] for four rows r and four columns c.
HWY_INLINE void transpose_4x4(const float* HWY_RESTRICT from, std::int64_t from_stride,
                              float* HWY_RESTRICT to, std::int64_t to_stride) {
  const F4 f;
  const hn::Repartition<double, F4> pairs;
  const auto r0 = hn::LoadU(f, from);
  const auto r1 = hn::LoadU(f, from + from_stride);
  const auto r2 = hn::LoadU(f, from + 2 * from_stride);
  const auto r3 = hn::LoadU(f, from + 3 * from_stride);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(f, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(f, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(f, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(f, r2, r3));
  hn::StoreU(hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23)), f, to);
  hn::StoreU(hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23)), f, to + to_stride);
  hn::StoreU(hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23)), f, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23)), f, to + 3 * to_stride);
}

/// A vector whose blocks of 128 bits hold four elements each, of rows first, first + 4, first + 8, …
HWY_INLINE VF load_blocks(const float* const* rows, int first, int column) {
  const F4 f;
  const auto block = [&](int r) HWY_ATTR { return hn::LoadU(f, rows[first + r] + column); };
#if HWY_MAX_BYTES == 16
  return block(0);
#elif HWY_MAX_BYTES == 32
  return hn::Combine(F(), block(4), block(0));
#else
  const hn::FixedTag<float, 8> half;
  return hn::Combine(F(), hn::Combine(half, block(12), block(8)), hn::Combine(half, block(4), block(0)));
#endif
}

/// Calls body(c, vector) for every column c below `count`, where lane n of the vector is rows[n][c].
template <typename Body>
HWY_INLINE void for_each_column(const float* const* rows, int count, const Body& body) {
  const hn::Repartition<double, F> pairs;
  int c = 0;
  for (; c + 4 <= count; c += 4) {  // 4x4 transposes, one in each block of 128 bits
    const VF r0 = load_blocks(rows, 0, c);
    const VF r1 = load_blocks(rows, 1, c);
    const VF r2 = load_blocks(rows, 2, c);
    const VF r3 = load_blocks(rows, 3, c);
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(F(), r0, r1));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(F(), r2, r3));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(F(), r0, r1));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(F(), r2, r3));
    body(c, hn::BitCast(F(), hn::InterleaveLower(pairs, low01, low23)));
    body(c + 1, hn::BitCast(F(), hn::InterleaveUpper(pairs, low01, low23)));
    body(c + 2, hn::BitCast(F(), hn::InterleaveLower(pairs, high01, high23)));
    body(c + 3, hn::BitCast(F(), hn::InterleaveUpper(pairs, high01, high23)));
  }
  for (; c < count; ++c) {
    alignas(64) float column[lanes];
    for (int lane = 0; lane < lanes; ++lane) column[lane] = rows[lane][c];
    body(c, hn::Load(F(), column));
  }
}

/// The size of the staging buffer of transpose_rows for rows of `count` elements, in floats.
constexpr std::int64_t transpose_staging(std::int64_t count) { return lanes * count; }

/// Calls body(lane, c, vector) with element c of the rows of lanes lane, lane + 1, …, as f32, for all lanes
/// below `width` and all elements below `count`. row(lane) is the address of a lane's row, in `dtype`. Rows
/// are copied to `staging` first, one at a time. Reading them column by column in place would be slow where
/// their distance is a power of two: then they map to the same cache sets and evict one another.
template <typename RowOf, typename Body>
HWY_INLINE void transpose_rows(int width, int count, DType dtype, float* staging, const RowOf& row,
                               const Body& body) {
  for (int first = 0; first < width; first += lanes) {
    const float* rows[lanes];
    for (int lane = 0; lane < lanes; ++lane) {
      rows[lane] = staging + lane * count;
      widen(staging + lane * count, row(first + lane), dtype, count, 1.0f);
    }
    for_each_column(rows, count, [&](int c, VF column) HWY_ATTR { body(first, c, column); });
  }
}

/// panel[c·width + lane] = factor · (element c of row(lane)), for `count` elements.
template <typename RowOf>
void rows_to_panel(float* panel, int width, int count, DType dtype, float factor, float* staging,
                   const RowOf& row) {
  const VF scale = set(factor);
  transpose_rows(width, count, dtype, staging, row, [&](int lane, int c, VF column) HWY_ATTR {
    store(hn::Mul(column, scale), panel + c * width + lane);
  });
}

/// The inverse: row(lane)[c] = panel[c·width + lane], rounded to `dtype`, for the first `rows` lanes.
template <typename RowOf>
void panel_to_rows(const float* panel, int width, int count, int rows, DType dtype, float* staging,
                   const RowOf& row) {
  for (int lane = 0; lane < rows; lane += 4) {
    const float* from = panel + lane;
    int c = 0;
    for (; c + 4 <= count; c += 4) transpose_4x4(from + c * width, width, staging + c, count);
    for (; c < count; ++c) {
      for (int r = 0; r < 4; ++r) staging[r * count + c] = from[c * width + r];
    }
    for (int r = 0; r < 4 && lane + r < rows; ++r) narrow(row(lane + r), dtype, staging + r * count, count);
  }
}

/// Rows of K or V of a key tile as f32: in the tensor itself if they are f32 and not paged, else converted
/// into a buffer.
struct RowBlock {
  const float* data;
  std::int64_t stride;
};

inline RowBlock load_key_rows(const AttentionCall& call, const Panel& panel, const Rows& rows, KeyTile tile,
                              int dim, float* buffer) {
  const bool paged = call.problem.layout == Layout::paged;
  if (!paged && rows.dtype == DType::f32) {
    return {
        reinterpret_cast<const float*>(call.key_row(rows, panel.sequence, panel.b, panel.h_kv, tile.first)),
        rows.stride_s};
  }
  for (int j = 0; j < tile.count; ++j) {
    widen(buffer + std::int64_t{j} * dim,
          call.key_row(rows, panel.sequence, panel.b, panel.h_kv, tile.first + j), rows.dtype, dim, 1.0f);
  }
  return {buffer, dim};
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
