#pragma once

#include "cuda/attention/sm90/forward/scheduler.cuh"
#include "cuda/attention/sm90/forward/scores.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::wgmma {

// The mask for 64 queries and a K tile is loaded as Q, K and V are: by TMA, in swizzled boxes with up to 128
// bytes of each row, into stages that each consumer has for itself. A tile of booleans takes one of four
// stages, a tile of 16-bit elements two, a tile of f32 all four. If all queries share a row of the mask,
// eight copies of the row are loaded, and every eight queries read these.

constexpr int mask_row_bytes(const ForwardConfig& c, int bytes_log2) {
  return std::min(128, c.keys << bytes_log2);
}

/// Part of the loader of V, which loads a tile's mask before its V. Consumers release them in this order, so
/// that there is no deadlock.
template <ForwardConfig c>
struct MaskLoader {
  const ForwardArguments& arguments;
  const CUtensorMap& map;
  const SharedMemory<c>& shared;
  Ring<c.mask_stages> rings[c.consumers];

  /// Loads the mask of K tile n, for those consumers that see a key of it.
  __device__ __forceinline__ void load(const WorkItem& item, int n) {
    if (arguments.mask.kind == MaskArguments::Kind::none) return;
#pragma unroll
    for (int w = 0; w < c.consumers; ++w) {
      const int first = first_row_of<c>(arguments, item, w);
      const BandOfKeys& band = c.general ? item.band : arguments.band;
      const TileSpan seen = tiles_of_rows<c>(band, 0, first, min(first + 64, band.length_q));
      if (n >= seen.first && n < seen.last) load_tile(w, rings[w], first, n * c.keys, item.h, item.b);
    }
  }
  __device__ __forceinline__ void load_tile(int consumer, Ring<c.mask_stages>& ring, int row, int key, int h,
                                            int b) {
    const int bytes_log2 = arguments.mask.bytes_log2;
    const int row_bytes = mask_row_bytes(c, bytes_log2);
    Mbarrier* const full = &shared.barriers().mask_full[consumer][ring.stage()];
    std::byte* const to_smem = shared.mask(consumer, ring.stage());
    wait(&shared.barriers().mask_empty[consumer][ring.stage()], ring.parity() ^ 1);
    arrive_expecting(full, (c.keys * arguments.mask.rows) << bytes_log2);
#pragma unroll 1
    for (int at = 0; at < c.keys << bytes_log2; at += row_bytes) {
      copy_box(to_smem + at * 64, map, full, key + (at >> bytes_log2), row, h, b);
    }
    ring.advance_by(1 << bytes_log2);
  }
};

// How a lane adds the mask to its elements of S: element 4j + 2h + e is key 8j + 2t + e of row half h. A lane
// keeps the address of its first chunk of 16 bytes. Because of the swizzle, the other chunks of the row
// follow from it by an exclusive or.

/// S = S · scale + mask, of 16-bit elements. ldmatrix loads four 8 x 8 matrices: 16 keys of 16 rows.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void add_halves(Scores<c>& s, std::uint32_t rows_smem, int eight_rows, float scale,
                                           int lane) {
  const std::uint32_t own =
      rows_smem + lane % 8 * 128 + lane / 8 % 2 * eight_rows + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int chunks = 0; chunks < 4; ++chunks) {
#pragma unroll
    for (int block = chunks; block < c.keys / 16; block += 4) {
      std::uint32_t words[4];
      load_matrices(words, (own ^ (chunks * 32)) + block / 4 * (64 * 128));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        T pair[2];
        *reinterpret_cast<std::uint32_t*>(pair) = words[n];
        s[8 * block + 2 * n] = fmaf(s[8 * block + 2 * n], scale, widen(pair[0]));
        s[8 * block + 2 * n + 1] = fmaf(s[8 * block + 2 * n + 1], scale, widen(pair[1]));
      }
    }
  }
}

template <ForwardConfig c>
__device__ __forceinline__ void add_floats(Scores<c>& s, std::uint32_t rows_smem, int eight_rows, float scale,
                                           int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const std::uint32_t own = rows_smem + g * 128 + ((t / 2) ^ g) * 16 + t % 2 * 8;
#pragma unroll
  for (int chunks = 0; chunks < 4; ++chunks) {
#pragma unroll
    for (int j = chunks; j < c.keys / 8; j += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 two = load_two_floats((own ^ (chunks * 32)) + j / 4 * (64 * 128) + half * eight_rows);
        const int n = 4 * j + 2 * half;
        s[n] = fmaf(s[n], scale, two.x);
        s[n + 1] = fmaf(s[n + 1], scale, two.y);
      }
    }
  }
}

/// S = −inf where a boolean mask is false; the others stay bare products.
template <ForwardConfig c>
__device__ __forceinline__ void hide_where_false(Scores<c>& s, std::uint32_t rows_smem, int eight_rows,
                                                 int lane) {
  constexpr int row_bytes = mask_row_bytes(c, 0);
  const int g = lane / 4;
  const int swizzled = row_bytes == 128 ? g : g / 2 % 4;
  const std::uint32_t own = rows_smem + g * row_bytes + swizzled * 16 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < c.keys / 2; n += 2) {
    const int j = n / 4;
    const std::uint32_t two = load_two_bytes((own ^ (j / 2 * 16)) + j % 2 * 8 + n / 2 % 2 * eight_rows);
    if ((two & 0xFF) == 0) s[n] = minus_infinity;
    if ((two & 0xFF00) == 0) s[n + 1] = minus_infinity;
  }
}

/// For a boolean mask whose row all queries share, such as padding: whether it shows all keys of the tile.
template <ForwardConfig c>
__device__ __forceinline__ bool shows_all(std::uint32_t tile_smem, int lane) {
  static_assert(c.keys <= 128);
  bool all = true;
  if (4 * lane < c.keys) {
    const std::uint32_t four = __float_as_uint(load_float(tile_smem + 4 * lane));
    all = ((four - 0x01010101u) & ~four & 0x80808080u) == 0;  // no byte is 0
  }
  return __all_sync(~0u, all);
}

/// Applies a mask to S. `tile_smem` is the consumer's stage, `first_row` the warp's first row in it.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void add_mask(Scores<c>& s, const MaskArguments& mask, std::uint32_t tile_smem,
                                         int first_row) {
  const int lane = lane_now();
  const int row_bytes = mask.rows == 64 ? mask_row_bytes(c, mask.bytes_log2) : 0;
  const std::uint32_t rows_smem = tile_smem + first_row * row_bytes;
  const int eight_rows = 8 * row_bytes;
  if (mask.kind == MaskArguments::Kind::boolean) {
    if (mask.rows < 64 && shows_all<c>(tile_smem, lane)) return;
    hide_where_false<c>(s, rows_smem, eight_rows, lane);
  } else if (mask.kind == MaskArguments::Kind::half) {
    add_halves<T, c>(s, rows_smem, eight_rows, mask.score_scale, lane);
  } else {
    add_floats<c>(s, rows_smem, eight_rows, mask.score_scale, lane);
  }
}

}  // namespace tilewise::cuda::wgmma
