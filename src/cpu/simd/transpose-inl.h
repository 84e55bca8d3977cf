// Between rows in memory, one a query, and panels, one query a lane: the transposes on the way in and out.

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

/// to[c·to_stride + r] = from[r·from_stride + c] for four rows and any number of columns.
HWY_INLINE void transpose_4_rows(const float* HWY_RESTRICT from, std::int64_t from_stride, int columns,
                                 float* HWY_RESTRICT to, std::int64_t to_stride) {
  int c = 0;
  for (; c + 4 <= columns; c += 4) transpose_4x4(from + c, from_stride, to + c * to_stride, to_stride);
  for (; c < columns; ++c) {
    for (int r = 0; r < 4; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

/// panel[c·width + lane] = factor · (element c of row(lane)), for `count` elements. `staging` holds 4·count
/// floats; row(lane) gives the address of the lane's row, in `dtype`.
template <typename RowOf>
void rows_to_panel(float* panel, int width, int count, DType dtype, float factor, float* staging,
                   const RowOf& row) {
  for (int lane = 0; lane < width; lane += 4) {
    for (int r = 0; r < 4; ++r) widen(staging + r * count, row(lane + r), dtype, count, factor);
    transpose_4_rows(staging, count, count, panel + lane, width);
  }
}

/// The way back: row(lane)[c] = panel[c·width + lane], rounded to `dtype`, for the first `rows` lanes.
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

/// Rows of keys or values as f32: where they lie if they can be read there, else converted or gathered into a
/// buffer.
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
