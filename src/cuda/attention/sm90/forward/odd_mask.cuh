#pragma once

#include "cuda/attention/sm90/forward/mask.cuh"
#include "cuda/attention/sm90/forward/odd_row.h"

namespace tilewise::cuda::wgmma {

// Masks whose rows do not start at multiples of 16 bytes, such as those of 197 keys, which TMA cannot copy in
// boxes. Instead each row of a tile is a bulk copy: all chunks of 16 bytes that overlap the row, which
// therefore starts up to 15 bytes after its place in the stage. Consumers compute this shift from the row's
// address, and load one element at a time. Copies do not read outside the mask: the parts of chunks at both
// of its ends are copied by loads and stores. A mask with one element for all keys is written by stores
// alone.

template <ForwardConfig c>
__device__ __forceinline__ bool has_odd_mask(const ArgumentsOf<c.combined()>& arguments) {
  if constexpr (c.combined()) return arguments.odd.data != 0;
  return false;
}

/// Distance in bytes from one row of a tile to the next.
constexpr int odd_row_bytes(const ForwardConfig& c, int bytes_log2) { return (c.keys << bytes_log2) + 16; }
/// Stages that a tile takes: twice as many as in boxes, or all of them, which have extra room behind them.
template <ForwardConfig c>
constexpr int odd_tile_stages(int bytes_log2) {
  return std::min(c.mask_stages, 2 << bytes_log2);
}

/// Copies the bytes of a row that the asynchronous copy leaves out. Returns whether there were any.
__device__ __forceinline__ bool copy_ends(std::byte* row_smem, const OddRow& row) {
  const auto* row_gmem = reinterpret_cast<const std::byte*>(row.place);
#pragma unroll 1
  for (int n = row.begin; n < min(row.from, row.end); ++n) row_smem[n] = row_gmem[n];
#pragma unroll 1
  for (int n = max(row.to, row.begin); n < row.end; ++n) row_smem[n] = row_gmem[n];
  return row.begin < row.from || row.to < row.end;
}

/// Loads tiles of such a mask. Called by a whole warp.
template <ForwardConfig c>
struct OddMaskLoader {
  const CombinedArguments& arguments;
  const SharedMemory<c>& shared;
  Ring<c.mask_stages> rings[c.consumers];

  /// Loads the mask of K tile n, for those consumers that see a key of it.
  __device__ __forceinline__ void load(const WorkItem& item, int n) {
#pragma unroll
    for (int w = 0; w < c.consumers; ++w) {
      const int first = first_row_of<c>(arguments, item, w);
      const TileSpan seen = tiles_of_rows<c>(item.band, 0, first, min(first + 64, item.band.length_q));
      if (n >= seen.first && n < seen.last) load_tile(w, rings[w], item, first, n * c.keys);
    }
  }

  __device__ __forceinline__ void load_tile(int consumer, Ring<c.mask_stages>& ring, const WorkItem& item,
                                            int first, int key) {
    const OddMask& mask = arguments.odd;
    const int bytes_log2 = arguments.mask.bytes_log2;
    Mbarrier* const full = &shared.barriers().mask_full[consumer][ring.stage()];
    std::byte* const tile_smem = shared.mask(consumer, ring.stage());
    const int rows = min(mask.rows, arguments.band.length_q - first);
    const int bytes = min(c.keys, arguments.band.length_k - key) << bytes_log2;
    wait(&shared.barriers().mask_empty[consumer][ring.stage()], ring.parity() ^ 1);
    const auto row_smem = [&](int row) { return tile_smem + row * odd_row_bytes(c, bytes_log2); };
    int sum = 0;  // bytes that asynchronous copies load
#pragma unroll 1
    for (int row = lane_now(); row < rows; row += 32) {
      std::byte* const row_smem = tile_smem + row * odd_row_bytes(c, bytes_log2);
      const std::uintptr_t row_gmem = mask.address(item.b, item.h, first + row);
      if (mask.one_key) {
        fill(row_smem, row_gmem, bytes_log2);
      } else {
        sum += copy_row(row_smem, OddRow(mask.first, mask.last, row_gmem + (key << bytes_log2), bytes), full);
      }
    }
    sum = __reduce_add_sync(~0u, sum);
    __syncwarp();  // stores of all lanes come before the arrival
    // The barrier's phase cannot complete before this arrival, even if all bytes have arrived already.
    if (lane_now() == 0) arrive_expecting(full, sum);
    ring.advance_by(odd_tile_stages<c>(bytes_log2));
  }

  /// Returns the number of bytes that will arrive at `full`.
  static __device__ __forceinline__ int copy_row(std::byte* row_smem, const OddRow& row, Mbarrier* full) {
    if (copy_ends(row_smem, row))
      fence_async_proxy();  // later tiles' asynchronous copies overwrite these stores
    if (row.from == row.to) return 0;
    copy_bytes(row_smem + row.from, reinterpret_cast<const void*>(row.place + row.from), row.to - row.from,
               full);
    return row.to - row.from;
  }

  /// Fills a row with one element.
  static __device__ __forceinline__ void fill(std::byte* row_smem, std::uintptr_t from, int bytes_log2) {
    std::uint32_t word = 0;
    if (bytes_log2 == 0) word = *reinterpret_cast<const std::uint8_t*>(from) * 0x01010101u;
    if (bytes_log2 == 1) word = *reinterpret_cast<const std::uint16_t*>(from) * 0x00010001u;
    if (bytes_log2 == 2) word = *reinterpret_cast<const std::uint32_t*>(from);
#pragma unroll 1
    for (int at = 0; at < c.keys << bytes_log2; at += 16) {
      *reinterpret_cast<uint4*>(row_smem + at) = uint4{word, word, word, word};
    }
  }
};

/// Loads such a mask and V of all items, like load_tiles() but with a whole warp.
template <ForwardConfig c>
__device__ __forceinline__ void load_values_and_odd_mask(const CombinedArguments& arguments,
                                                         const CUtensorMap& map,
                                                         const SharedMemory<c>& shared) {
  Barriers<c>& barriers = shared.barriers();
  OddMaskLoader<c> mask{arguments, shared};
  Ring<c.work_stages> items;
  Ring<c.stages> ring;
#pragma unroll 1
  for (bool more = true; more; items.advance()) {
    wait(&barriers.work_full[items.stage()], items.parity());
    const WorkItem& item = barriers.items[items.stage()];  // read where needed: registers are short
#pragma unroll 1
    for (int n = item.loaded.last - 1; n >= item.loaded.first; --n) {
      wait(&barriers.first_keys_full, 0);  // the CTA's first K tile is needed before its first V
      mask.load(item, n);
      if (lane_now() == 0) {
        wait(&barriers.v_empty[ring.stage()], ring.parity() ^ 1);
        load_panels<c.dim_v, c.keys>(shared.values(ring.stage()), map, &barriers.v_full[ring.stage()],
                                     n * c.keys + item.row_k, quotient(item.h, arguments.group), item.map_b);
      }
      __syncwarp();
      ring.advance();
    }
    more = item.more != 0;
    __syncwarp();  // all lanes have read the item
    if (lane_now() == 0) arrive(&barriers.work_empty[items.stage()]);
  }
}

/// Applies such a mask to S, as add_mask() does. `row` is the lane's row g among the consumer's 64, which is
/// row `first` + g of the head.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void add_odd_mask(Scores<c>& s, const CombinedArguments& arguments,
                                             const WorkItem& item, std::uint32_t tile_smem, int first,
                                             int row) {
  const OddMask& mask = arguments.odd;
  const int bytes_log2 = arguments.mask.bytes_log2;
  const std::uint32_t column = static_cast<std::uint32_t>(lane_now() % 4 * 2) << bytes_log2;
  std::uint32_t own[2];  // the lane's first element of both rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = mask.rows == 1 ? 0 : row + 8 * half;
    own[half] = tile_smem + tile_row * odd_row_bytes(c, bytes_log2) +
                mask.shift(item.b, item.h, first + row + 8 * half) + column;
  }
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) body(s[n], own[n / 2 % 2], n / 4 * 8 + n % 2);
  };
  const float scale = arguments.mask.score_scale;
  if (arguments.mask.kind == MaskArguments::Kind::boolean) {
    each([](float& score, std::uint32_t at, int key) {
      if (load_byte(at + key) == 0) score = minus_infinity;
    });
  } else if (arguments.mask.kind == MaskArguments::Kind::half) {
    each([=](float& score, std::uint32_t at, int key) {
      const auto bits = static_cast<std::uint16_t>(load_two_bytes(at + 2 * key));
      score = fmaf(score, scale, widen(*reinterpret_cast<const T*>(&bits)));
    });
  } else {
    each([=](float& score, std::uint32_t at, int key) {
      score = fmaf(score, scale, load_float(at + 4 * key));
    });
  }
}

}  // namespace tilewise::cuda::wgmma
