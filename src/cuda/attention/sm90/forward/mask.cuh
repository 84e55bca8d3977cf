#pragma once

#include "cuda/attention/sm90/forward/scores.cuh"
#include "cuda/attention/sm90/forward/turns.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/tile/element.cuh"

namespace tilewise::cuda::wgmma {

// A mask's elements for 64 queries and a tile of keys come as q, k and v do: by boxes of 128 bytes of each
// row, swizzled, to places that are a consumer's own. A tile of booleans takes one of four places, of 16 bits
// two, of f32 all. Where queries share a row, eight of them come, and are every eight queries'.

constexpr int mask_row_bytes(const ForwardConfig& c, int bytes_log2) {
  return std::min(128, c.keys << bytes_log2);
}

/// Part of the loader of values, which asks for a tile's mask before its values. Consumers want them in that
/// order, so that none waits for what is behind something that waits for it.
template <ForwardConfig c>
struct MaskLoader {
  const ForwardArguments& arguments;
  const CUtensorMap& map;
  const SharedMemory<c>& shared;
  Ring<c.mask_places> rings[c.consumers];

  /// For those consumers that see something of tile n of keys.
  __device__ __forceinline__ void load(const HandedTurn& turn, int n) {
    if (arguments.mask.kind == MaskArguments::Kind::none) return;
#pragma unroll
    for (int w = 0; w < c.consumers; ++w) {
      const int first = first_row_of<c>(arguments, turn, w);
      const TileSpan seen =
          tiles_of_rows<c>(arguments.band, 0, first, min(first + 64, arguments.band.length_q));
      if (n >= seen.first && n < seen.last) load_tile(w, rings[w], first, n * c.keys, turn.h, turn.b);
    }
  }
  __device__ __forceinline__ void load_tile(int consumer, Ring<c.mask_places>& ring, int row, int key, int h,
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

// What is added to scores, by lanes as they have these: of row half h, element 4j + 2h + e is key 8j + 2t +
// e. A lane's address has the chunk of 16 bytes that it begins with, and others of its row follow by an
// exclusive or, as chunks are swizzled.

/// Eight scores of 16 keys, a matrix a load of 8 x 8.
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

/// Scores that a boolean mask hides; the others stay bare products.
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

/// What a mask makes of scores; `tile_smem` is the consumer's place, `first_row` the warp's first row of it.
template <typename T, ForwardConfig c>
__device__ __forceinline__ void add_mask(Scores<c>& s, const MaskArguments& mask, std::uint32_t tile_smem,
                                         int first_row) {
  const int lane = lane_now();
  const int row_bytes = mask.rows == 64 ? mask_row_bytes(c, mask.bytes_log2) : 0;
  const std::uint32_t rows_smem = tile_smem + first_row * row_bytes;
  const int eight_rows = 8 * row_bytes;
  if (mask.kind == MaskArguments::Kind::boolean) {
    hide_where_false<c>(s, rows_smem, eight_rows, lane);
  } else if (mask.kind == MaskArguments::Kind::half) {
    add_halves<T, c>(s, rows_smem, eight_rows, mask.score_scale, lane);
  } else {
    add_floats<c>(s, rows_smem, eight_rows, mask.score_scale, lane);
  }
}

}  // namespace tilewise::cuda::wgmma
