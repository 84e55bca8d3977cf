#pragma once

#include <utility>

#include "cuda/gemm/arguments.h"
#include "cuda/gemm/consumer.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/activation.cuh"
#include "cuda/tile/bias.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::gemm {

/// How a warp finishes and writes its rows of sums, 16 rows of 64 columns at a time: by way of slabs in
/// shared memory, rows of 128 bytes in swizzled chunks, so that memory is read and written 16 bytes at a
/// time. Nobody else is waited for, and the stores are under way while the warp is at the next tile. It has
/// two slabs: the next residual comes into one while the other is in use, and the first of a tile comes under
/// its products.
template <typename T, GemmConfig c>
struct Writer {
  const GemmArguments& arguments;
  std::byte* slabs_smem;
  const int lane;
  int row = 0;     ///< the first of the tile's
  int column = 0;  ///< the tile's first

  static constexpr int slabs = (c.out_columns() + 63) / 64;  ///< in 16 rows
  static constexpr int chunks_of(int slab) { return std::min(8, c.out_columns() / 8 - 8 * slab); }
  static constexpr int chunk_at(int r, int chunk) { return r * 128 + (chunk ^ r % 8) * 16; }

  /// A slab's part of a tile: pieces are counted along columns, then along the consumer's tiles of 64 rows.
  template <int piece>
  struct Piece {
    static constexpr int first_row = piece / slabs * 64;
    static constexpr int slab = piece % slabs;
    static constexpr int chunks = chunks_of(slab);
    static constexpr int rounds = (16 * chunks + 31) / 32;  ///< of lanes, a chunk each
  };

  /// Whether the result is in f32.
  __device__ __forceinline__ bool wide() const { return arguments.epilogue.out.dtype == DType::f32; }
  __device__ __forceinline__ std::byte* slab_of(int piece) const {
    return slabs_smem + piece % 2 * c.slab_bytes();
  }
  __device__ __forceinline__ std::uint32_t place(int piece, int group) const {  // of 16 columns
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(slab_of(piece))) +
           chunk_at(lane % 16, 2 * group + lane / 16);
  }

  /// Calls `body` with the lane's chunks of a piece that are in the result: row, first column, and where they
  /// stand in the slab.
  template <int piece, typename Body>
  __device__ __forceinline__ void for_each_chunk(const Body& body) const {
    using P = Piece<piece>;
#pragma unroll
    for (int n = 0; n < P::rounds; ++n) {
      const int r = (n * 32 + lane) / P::chunks;
      const int chunk = (n * 32 + lane) % P::chunks;
      const int at_row = row + P::first_row + r;
      const int at_column = column + 64 * P::slab + 8 * chunk;
      if (r < 16 && at_row < arguments.m && at_column < arguments.n) {
        body(at_row, at_column, slab_of(piece) + chunk_at(r, chunk));
      }
    }
  }

  /// Starts to load a residual into its slab.
  template <int piece>
  __device__ __forceinline__ void fetch_residual() const {
    const Matrix& residual = arguments.epilogue.residual;
    if (residual.data == nullptr || wide()) return;
    for_each_chunk<piece>([&](int at_row, int at_column, std::byte* to_smem) {
      const std::byte* from = residual.data + (at_row * residual.stride_row + at_column) * 2;
      copy_async_part(to_smem, from, min(16, (arguments.n - at_column) * 2));
    });
    commit_copies();
  }

  /// The lane's columns of a piece: two of every eight.
  template <int piece, int count>
  __device__ __forceinline__ void add_bias(float (&x)[count], const Vector& bias) const {
    if (bias.data == nullptr) return;
    const auto at = [&](int n) { return n < arguments.n ? bias_at<T>(bias, n) : 0.0f; };
#pragma unroll
    for (int n = 0; n < count / 4; ++n) {
      const int first = column + 64 * Piece<piece>::slab + 8 * n + lane % 4 * 2;
      const float low = at(first);
      const float high = at(first + 1);
      x[4 * n] += low;
      x[4 * n + 1] += high;
      x[4 * n + 2] += low;
      x[4 * n + 3] += high;
    }
  }

  template <int piece, int count>
  __device__ __forceinline__ void add_residual(float (&x)[count]) const {
    if (arguments.epilogue.residual.data == nullptr) return;
    constexpr int chunks = Piece<piece>::chunks;
    wait_copies<(piece + 1 < slabs * c.row_tiles ? 1 : 0)>();  // all but the next
    __syncwarp();                                              // other lanes' too
#pragma unroll
    for (int group = 0; group < (chunks + 1) / 2; ++group) {
      std::uint32_t four[4];
      load_matrices(four, place(piece, group));
#pragma unroll
      for (int e = 0; e < (2 * group + 1 < chunks ? 4 : 2); ++e) {
        const float2 two = unpack<T>(four[e]);
        x[8 * group + 2 * e] += two.x;
        x[8 * group + 2 * e + 1] += two.y;
      }
    }
    __syncwarp();  // the residual was read
  }

  template <int piece, int count>
  __device__ __forceinline__ void write(const float (&x)[count]) const {
    constexpr int chunks = Piece<piece>::chunks;
#pragma unroll
    for (int group = 0; group < (chunks + 1) / 2; ++group) {
      const bool whole = 2 * group + 1 < chunks;  // else the second eight columns are nobody's
      const float* const at = x + 8 * group;
      const std::uint32_t four[4] = {pack<T>(at[0], at[1]), pack<T>(at[2], at[3]),
                                     whole ? pack<T>(at[4], at[5]) : 0, whole ? pack<T>(at[6], at[7]) : 0};
      store_matrices(place(piece, group), four);
    }
    __syncwarp();  // the warp's rows are there
    const Matrix& out = arguments.epilogue.out;
    for_each_chunk<piece>([&](int at_row, int at_column, const std::byte* from_smem) {
      store_eight(out.data + at_row * out.stride_row * 2, at_column, arguments.n, true,
                  *reinterpret_cast<const uint4*>(from_smem));
    });
    __syncwarp();  // the slab is free
  }

  /// The same in f32, half the columns at a time; residuals are added on the way out.
  template <int piece, int count>
  __device__ __forceinline__ void write_wide(const float (&x)[count]) const {
    std::byte* slab = slab_of(piece);
    const Epilogue& epilogue = arguments.epilogue;
#pragma unroll
    for (int half = 0; half < (count + 15) / 16; ++half) {
#pragma unroll
      for (int n = 4 * half; n < min(4 * half + 4, count / 4); ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // rows g and g + 8, two columns
          const int chunk = 2 * (n % 4) + lane % 4 / 2;
          *reinterpret_cast<float2*>(slab + chunk_at(lane / 4 + 8 * e, chunk) + lane % 2 * 8) = {
              x[4 * n + 2 * e], x[4 * n + 2 * e + 1]};
        }
      }
      __syncwarp();  // 16 rows of 32 columns are there
      const int chunk = lane % 8;
      const int at_column = column + 64 * Piece<piece>::slab + 32 * half + 4 * chunk;
#pragma unroll
      for (int r = lane / 8; r < 16; r += 4) {
        const int at_row = row + Piece<piece>::first_row + r;
        if (at_row >= arguments.m || 16 * half + 2 * chunk >= count) continue;
        const auto* from = reinterpret_cast<const float*>(slab + chunk_at(r, chunk));
        auto* to = reinterpret_cast<float*>(epilogue.out.data) + at_row * epilogue.out.stride_row + at_column;
        const auto* more = reinterpret_cast<const float*>(epilogue.residual.data) +
                           at_row * epilogue.residual.stride_row + at_column;
        if (at_column + 4 <= arguments.n) {
          float4 four = *reinterpret_cast<const float4*>(from);
          if (epilogue.residual.data != nullptr) {
            const float4 add = *reinterpret_cast<const float4*>(more);
            four = {four.x + add.x, four.y + add.y, four.z + add.z, four.w + add.w};
          }
          *reinterpret_cast<float4*>(to) = four;
        } else {
          for (int n = 0; at_column + n < arguments.n; ++n) {
            to[n] = from[n] + (epilogue.residual.data != nullptr ? more[n] : 0.0f);
          }
        }
      }
      __syncwarp();  // the slab is free
    }
  }

  template <int piece>
  __device__ __forceinline__ void finish_piece(const Sums<c>& all_sums) const {
    constexpr int count = 4 * Piece<piece>::chunks;
    if constexpr (piece + 1 < slabs * c.row_tiles) fetch_residual<piece + 1>();
    const Epilogue& epilogue = arguments.epilogue;
    const float(&sums)[c.columns / 2] = all_sums[piece / slabs];
    float x[count];
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] = sums[32 * Piece<piece>::slab + n];
    add_bias<piece>(x, c.gated ? epilogue.gate_bias : epilogue.bias);
    activate_all<true>(x, epilogue.activation);
    if constexpr (c.gated) {
      float up[count];
#pragma unroll
      for (int n = 0; n < count; ++n) up[n] = sums[c.columns / 4 + 32 * Piece<piece>::slab + n];
      add_bias<piece>(up, epilogue.bias);
#pragma unroll
      for (int n = 0; n < count; ++n) x[n] *= up[n];
    }
    if (wide()) {
      write_wide<piece>(x);
    } else {
      add_residual<piece>(x);
      write<piece>(x);
    }
  }

  /// Before a tile's products.
  __device__ __forceinline__ void begin(int first_row, int first_column) {
    row = first_row;
    column = first_column;
    fetch_residual<0>();
  }
  /// After them.
  __device__ __forceinline__ void finish(const Sums<c>& sums) const {
    [&]<int... piece>(std::integer_sequence<int, piece...>) {
      (finish_piece<piece>(sums), ...);
    }(std::make_integer_sequence<int, slabs * c.row_tiles>{});
  }
};

}  // namespace tilewise::cuda::gemm
