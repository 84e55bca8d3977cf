#pragma once

#include <utility>

#include "cuda/gemm/sm90/arguments.h"
#include "cuda/gemm/sm90/tiles/consumer.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::gemm {

/// The epilogue of a warp. It finishes and stores a piece of 16 rows by 64 columns at a time, through slabs
/// in shared memory (swizzled chunks of 16 bytes), from which TMA stores the piece while the warp works on
/// the next tile. A warp waits for no other warp. It has two slabs: the next residual is loaded into one
/// while the other is in use, and the first residual of a tile is loaded while the tile's products run.
///
/// If there are enough registers, results are rounded when the sums are complete, kept, and put into the
/// slabs during the next tile's first stages. Residuals are then loaded into the same registers: in narrow
/// tiles after each piece, in others after all pieces, because the fence before a TMA store waits for all
/// loads of the warp.
template <typename T, GemmConfig c>
struct Writer {
  static_assert(c.out_columns() % 8 == 0);
  static constexpr int slabs = (c.out_columns() + 63) / 64;  ///< pieces along the columns
  static constexpr int pieces = slabs * c.row_tiles;         ///< of a tile

  /// Chunks in a row of a piece. The last piece of a row of pieces may be narrower.
  static constexpr int chunks_of(int piece) { return std::min(8, c.out_columns() / 8 - piece % slabs * 8); }
  /// A lane's elements of a piece.
  template <int piece>
  using Values = float[4 * chunks_of(piece)];

  const GemmMaps& maps;
  const GemmArguments& arguments;
  std::byte* slabs_smem;
  const int lane;
  int row = 0;     ///< the warp's first, in the result
  int column = 0;  ///< the tile's first, in the result

  /// Whether there are registers for a tile's results beside the next tile's accumulators.
  static constexpr bool keeps = !c.wide && c.row_tiles * (c.columns / 2 + c.out_columns() / 4) <= 192;
  static constexpr int parts = keeps ? (c.hides_end() ? 2 : 1) * pieces : 0;
  static constexpr int kept_words = keeps ? 2 * chunks_of(0) : 1;  ///< of a piece
  bool is_kept = false;
  int next_row = 0, next_column = 0;
  std::uint32_t kept[keeps ? pieces : 1][kept_words];

  // Pieces are counted along columns, then along the consumer's tiles of 64 rows.
  __device__ __forceinline__ int row_of(int piece) const { return row + piece / slabs * 64; }
  __device__ __forceinline__ int column_of(int piece) const { return column + piece % slabs * 64; }
  __device__ __forceinline__ std::byte* slab_of(int piece) const {
    return slabs_smem + piece % 2 * c.slab_bytes();
  }
  static constexpr int chunk_at(int r, int chunk) { return r * 128 + (chunk ^ r % 8) * 16; }
  __device__ __forceinline__ std::uint32_t place(int piece, int group) const {  // of 16 columns
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(slab_of(piece))) +
           chunk_at(lane % 16, 2 * group + lane / 16);
  }
  /// Waits until all but `copies` of the warp's TMA stores have read their slabs.
  template <int copies>
  __device__ __forceinline__ void wait_for_slabs() const {
    if (lane == 0) wait_stores_read<copies>();
    __syncwarp();
  }

  /// Starts to load a residual into its slab, after the slab's last TMA store has read it.
  template <int piece>
  __device__ __forceinline__ void fetch_residual() const {
    const Matrix& residual = arguments.epilogue.residual;
    if (c.wide || residual.data == nullptr) return;
    wait_for_slabs<0>();
    const int chunk = lane % 8;
    const int at_column = column_of(piece) + 8 * chunk;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
      const int at_row = row_of(piece) + r;
      if (chunk >= chunks_of(piece) || at_row >= arguments.m || at_column >= arguments.n) continue;
      const std::byte* from = residual.data + (at_row * residual.stride_row + at_column) * 2;
      copy_async_part(slab_of(piece) + chunk_at(r, chunk), from, min(16, (arguments.n - at_column) * 2));
    }
    commit_copies();
  }

  /// The lane's columns of a piece: two of every eight.
  template <int piece>
  __device__ __forceinline__ void add_bias(Values<piece>& x, const Vector& bias) const {
    if (bias.data == nullptr) return;
    const auto at = [&](int n) { return n < arguments.n ? bias_at<T>(bias, n) : 0.0f; };
#pragma unroll
    for (int n = 0; n < chunks_of(piece); ++n) {
      const int first = column_of(piece) + 8 * n + lane % 4 * 2;
      const float low = at(first);
      const float high = at(first + 1);
      x[4 * n] += low;
      x[4 * n + 1] += high;
      x[4 * n + 2] += low;
      x[4 * n + 3] += high;
    }
  }

  template <int piece>
  __device__ __forceinline__ void add_residual(Values<piece>& x) const {
    if (arguments.epilogue.residual.data == nullptr) return;
    wait_copies<(piece + 1 < pieces ? 1 : 0)>();  // all but the next piece's
    __syncwarp();                                 // other lanes' too
#pragma unroll
    for (int group = 0; group < (chunks_of(piece) + 1) / 2; ++group) {
      std::uint32_t four[4];
      load_matrices(four, place(piece, group));
#pragma unroll
      for (int e = 0; e < (2 * group + 1 < chunks_of(piece) ? 4 : 2); ++e) {
        const float2 two = unpack<T>(four[e]);
        x[8 * group + 2 * e] += two.x;
        x[8 * group + 2 * e + 1] += two.y;
      }
    }
    __syncwarp();  // the residual was read
  }

  /// A lane's elements of a piece, rounded.
  template <int piece>
  using Words = std::uint32_t[2 * chunks_of(piece)];

  template <int piece>
  __device__ __forceinline__ static void round(std::uint32_t* words, const Values<piece>& x) {
#pragma unroll
    for (int n = 0; n < 2 * chunks_of(piece); ++n) words[n] = pack<T>(x[2 * n], x[2 * n + 1]);
  }

  template <int piece>
  __device__ __forceinline__ void write(const std::uint32_t* words) const {
    // The piece before the last used this slab; at a tile's first piece, it may have been the last one.
    wait_for_slabs<(piece == 0 && pieces % 2 == 1 ? 0 : 1)>();
#pragma unroll
    for (int group = 0; group < (chunks_of(piece) + 1) / 2; ++group) {
      const bool whole = 2 * group + 1 < chunks_of(piece);  // else the second eight columns are not copied
      const std::uint32_t* const at = words + 4 * group;
      const std::uint32_t four[4] = {at[0], at[1], whole ? at[2] : 0, whole ? at[3] : 0};
      store_matrices(place(piece, group), four);
    }
    fence_async_proxy();  // before the copy reads the slab
    __syncwarp();         // the warp's rows are there
    if (lane == 0) {
      store_box(chunks_of(piece) == 8 ? maps.out : maps.out_rest, slab_of(piece), column_of(piece),
                row_of(piece));
      commit_stores();
    }
  }

  /// Writes a piece in f32, half the columns at a time, and adds the residual.
  __device__ __forceinline__ void write_wide(const float (&x)[32], int piece) const {
    std::byte* slab = slab_of(piece);
    const Epilogue& epilogue = arguments.epilogue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // rows g and g + 8, two columns
          const float* const at = x + 16 * half + 4 * n + 2 * e;
          *reinterpret_cast<float2*>(slab + chunk_at(lane / 4 + 8 * e, 2 * n + lane % 4 / 2) +
                                     lane % 2 * 8) = {at[0], at[1]};
        }
      }
      __syncwarp();  // 16 rows of 32 columns are complete
      const int chunk = lane % 8;
      const int at_column = column_of(piece) + 32 * half + 4 * chunk;
#pragma unroll 1
      for (int r = lane / 8; r < 16; r += 4) {
        const int at_row = row_of(piece) + r;
        if (at_row >= arguments.m) continue;
        const auto* from = reinterpret_cast<const float*>(slab + chunk_at(r, chunk));
        auto* to = reinterpret_cast<float*>(epilogue.out.data) + at_row * epilogue.out.stride_row;
        const auto* more =
            reinterpret_cast<const float*>(epilogue.residual.data) + at_row * epilogue.residual.stride_row;
        if (at_column + 4 <= arguments.n) {
          float4 four = *reinterpret_cast<const float4*>(from);
          if (epilogue.residual.data != nullptr) {
            const float4 add = *reinterpret_cast<const float4*>(more + at_column);
            four = {four.x + add.x, four.y + add.y, four.z + add.z, four.w + add.w};
          }
          *reinterpret_cast<float4*>(to + at_column) = four;
        } else {
          for (int n = 0; at_column + n < arguments.n; ++n) {
            to[at_column + n] = from[n] + (epilogue.residual.data != nullptr ? more[at_column + n] : 0.0f);
          }
        }
      }
      __syncwarp();  // the slab is free
    }
  }

  /// Bias, activation and gate of a piece; the residual is added later.
  template <int piece>
  __device__ __forceinline__ void finish_values(Values<piece>& x, const Sums<c>& all_sums) const {
    const Epilogue& epilogue = arguments.epilogue;
    const float(&sums)[c.columns / 2] = all_sums[piece / slabs];
    constexpr int first = piece % slabs * 32;
    constexpr int count = 4 * chunks_of(piece);
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] = sums[first + n];
    add_bias<piece>(x, c.gated ? epilogue.gate_bias : epilogue.bias);
    activate_all<!c.wide>(x, epilogue.activation);
    if constexpr (c.gated) {
      Values<piece> up;
#pragma unroll
      for (int n = 0; n < count; ++n) up[n] = sums[c.columns / 4 + first + n];
      add_bias<piece>(up, epilogue.bias);
#pragma unroll
      for (int n = 0; n < count; ++n) x[n] *= up[n];
    }
  }

  /// Whether the epilogue is at most a residual, in configurations that treat this case apart.
  __device__ __forceinline__ bool bare() const {
    const Epilogue& epilogue = arguments.epilogue;
    return c.hides_end() && !c.gated && epilogue.bias.data == nullptr &&
           epilogue.activation == Activation::none;
  }
  template <int piece>
  __device__ __forceinline__ static void bare_values(Values<piece>& x, const Sums<c>& sums) {
#pragma unroll
    for (int n = 0; n < 4 * chunks_of(piece); ++n) x[n] = sums[piece / slabs][piece % slabs * 32 + n];
  }

  template <int piece>
  __device__ __forceinline__ void finish_bare_piece(const Sums<c>& sums) const {
    Values<piece> x;
    bare_values<piece>(x, sums);
    Words<piece> words;
    round<piece>(words, x);
    write<piece>(words);
  }
  template <int piece>
  __device__ __forceinline__ void finish_piece(const Sums<c>& sums) const {
    if constexpr (piece + 1 < pieces) fetch_residual<piece + 1>();
    Values<piece> x;
    finish_values<piece>(x, sums);
    if constexpr (c.wide) {
      write_wide(x, piece);
    } else {
      add_residual<piece>(x);
      Words<piece> words;
      round<piece>(words, x);
      write<piece>(words);
    }
  }

  /// Loads the lane's residuals of a piece of the next tile: two of every eight columns, in two rows.
  template <int piece>
  __device__ __forceinline__ void load_residual() {
    const Matrix& residual = arguments.epilogue.residual;
    const int at_row = next_row + piece / slabs * 64 + lane / 4;
    const int at_column = next_column + piece % slabs * 64 + lane % 4 * 2;
    const std::byte* from = residual.data + (at_row * residual.stride_row + at_column) * 2;
#pragma unroll
    for (int n = 0; n < chunks_of(piece); ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = at_row + 8 * half < arguments.m && at_column + 8 * n < arguments.n;
        kept[piece][2 * n + half] =
            there
                ? *reinterpret_cast<const std::uint32_t*>(from + 8 * half * residual.stride_row * 2 + 16 * n)
                : 0;
      }
    }
  }

  template <int piece>
  __device__ __forceinline__ void keep_sum(Values<piece>& x, bool residual) {
    if (residual) {
#pragma unroll
      for (int n = 0; n < 2 * chunks_of(piece); ++n) {
        const float2 two = unpack<T>(kept[piece][n]);
        x[2 * n] += two.x;
        x[2 * n + 1] += two.y;
      }
    }
    round<piece>(kept[piece], x);
  }
  template <int piece>
  __device__ __forceinline__ void keep_piece(const Sums<c>& sums) {
    Values<piece> x;
    finish_values<piece>(x, sums);
    keep_sum<piece>(x, arguments.epilogue.residual.data != nullptr);
  }
  /// The same where the epilogue is at most a residual.
  template <int piece>
  __device__ __forceinline__ void keep_bare_piece(const Sums<c>& sums, bool residual) {
    Values<piece> x;
    bare_values<piece>(x, sums);
    keep_sum<piece>(x, residual);
  }

  template <typename Body>
  static __device__ __forceinline__ void for_each_piece(const Body& body) {
    [&]<int... piece>(std::integer_sequence<int, piece...>) {
      (body.template operator()<piece>(), ...);
    }(std::make_integer_sequence<int, pieces>{});
  }

  /// While products run: stores a piece of the tile before, and loads residuals of this one.
  template <int number>
  __device__ __forceinline__ void part() {
    constexpr int piece = number % pieces;
    constexpr bool writes = number < pieces, loads = !writes || !c.hides_end();
    if (writes && is_kept) write<piece>(kept[piece]);
    if (loads && arguments.epilogue.residual.data != nullptr) load_residual<piece>();
    if (writes && piece + 1 == pieces) move_on();
  }
  __device__ __forceinline__ void move_on() {
    row = next_row;
    column = next_column;
  }

  /// Before a tile's products.
  __device__ __forceinline__ void begin(int first_row, int first_column) {
    next_row = first_row;
    next_column = first_column;
    if constexpr (!keeps) {
      move_on();
      fetch_residual<0>();
    }
  }
  /// After them. The tensor cores are idle meanwhile, so the bare case has straight code without branches,
  /// except in narrow tiles.
  __device__ __forceinline__ void finish(const Sums<c>& sums) {
    const bool residual = arguments.epilogue.residual.data != nullptr;
    if constexpr (keeps) {
      is_kept = true;
      if (bare() && !residual) {
        for_each_piece([&]<int piece>() { keep_bare_piece<piece>(sums, false); });
      } else if (bare()) {
        for_each_piece([&]<int piece>() { keep_bare_piece<piece>(sums, true); });
      } else {
        for_each_piece([&]<int piece>() { keep_piece<piece>(sums); });
      }
    } else if constexpr (!c.wide) {
      if (bare() && !residual) {
        for_each_piece([&]<int piece>() { finish_bare_piece<piece>(sums); });
      } else {
        for_each_piece([&]<int piece>() { finish_piece<piece>(sums); });
      }
    } else {
      for_each_piece([&]<int piece>() { finish_piece<piece>(sums); });
    }
  }
  /// Before the CTA exits: stores what is kept, and waits until shared memory has been read.
  __device__ __forceinline__ void end() {
    if constexpr (keeps) {
      if (is_kept) for_each_piece([&]<int piece>() { write<piece>(kept[piece]); });
    }
    wait_for_slabs<0>();
  }
};

}  // namespace tilewise::cuda::gemm
