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

/// The epilogue of a warp. It finishes and stores a subtile of 16 rows by 64 columns at a time. A subtile
/// goes through a slab in shared memory (swizzled chunks of 16 bytes), from which TMA stores it while the
/// warp works on the next one. No warp waits for another. Each has two slabs: the next residual is loaded
/// into one while the other is in use, and the first residual of a tile is loaded during the tile's mainloop.
///
/// If there are enough registers (`keeps`), results are rounded when the accumulators are complete, kept in
/// registers, and stored through the slabs during the first stages of the next tile's mainloop. Residuals are
/// then loaded into the same registers: in narrow tiles after each subtile, in others after all subtiles,
/// because the fence before a TMA store waits for all loads of the warp.
template <typename T, GemmConfig c, typename Arguments = GemmArguments>
struct Writer {
  static_assert(c.out_columns() % 8 == 0);
  static constexpr int slabs = (c.out_columns() + 63) / 64;  ///< subtiles along the columns
  static constexpr int subtiles = slabs * c.row_tiles;       ///< that the warp has in a tile

  /// Chunks of eight columns in a row of a subtile. The last subtile of a row may be narrower.
  static constexpr int chunks_of(int subtile) {
    return std::min(8, c.out_columns() / 8 - subtile % slabs * 8);
  }
  /// A lane's elements of a subtile.
  template <int subtile>
  using Values = float[4 * chunks_of(subtile)];

  const GemmMaps& maps;
  const Arguments& arguments;
  std::byte* slabs_smem;
  const int lane;
  int row = 0;     ///< the warp's first, in the result
  int column = 0;  ///< the tile's first, in the result

  /// Whether there are registers for a tile's results beside the next tile's accumulators.
  static constexpr bool keeps = !c.out_f32 && c.row_tiles * (c.columns / 2 + c.out_columns() / 4) <= 192;
  /// Steps of the epilogue that overlap with the next tile's mainloop (Consumer::multiply).
  static constexpr int steps = keeps ? (c.overlaps_epilogue() ? 2 : 1) * subtiles : 0;
  static constexpr int kept_words = keeps ? 2 * chunks_of(0) : 1;  ///< of a subtile
  bool is_kept = false;
  int next_row = 0, next_column = 0;
  std::uint32_t kept[keeps ? subtiles : 1][kept_words];

  // Subtiles are numbered along the columns, then along the consumer's tiles of 64 rows.
  __device__ __forceinline__ int row_of(int subtile) const { return row + subtile / slabs * 64; }
  __device__ __forceinline__ int column_of(int subtile) const { return column + subtile % slabs * 64; }
  __device__ __forceinline__ std::byte* slab_of(int subtile) const {
    return slabs_smem + subtile % 2 * c.slab_bytes();
  }
  static constexpr int chunk_at(int r, int chunk) { return r * 128 + (chunk ^ r % 8) * 16; }
  /// The address for ldmatrix and stmatrix of a group of 16 columns.
  __device__ __forceinline__ std::uint32_t slab_address(int subtile, int group) const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(slab_of(subtile))) +
           chunk_at(lane % 16, 2 * group + lane / 16);
  }
  /// Waits until all but `copies` of the warp's TMA stores have read their slabs.
  template <int copies>
  __device__ __forceinline__ void wait_for_slabs() const {
    if (lane == 0) wait_stores_read<copies>();
    __syncwarp();
  }

  /// Starts to load a residual into its slab, after the slab's last TMA store has read it.
  template <int subtile>
  __device__ __forceinline__ void fetch_residual() const {
    const Matrix& residual = arguments.epilogue.residual;
    if (c.out_f32 || residual.data == nullptr) return;
    wait_for_slabs<0>();
    const int chunk = lane % 8;
    const int at_column = column_of(subtile) + 8 * chunk;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
      const int at_row = row_of(subtile) + r;
      if (chunk >= chunks_of(subtile) || at_row >= arguments.m || at_column >= arguments.n) continue;
      const std::byte* from = residual.data + (at_row * residual.stride_row + at_column) * 2;
      copy_async_part(slab_of(subtile) + chunk_at(r, chunk), from, min(16, (arguments.n - at_column) * 2));
    }
    commit_copies();
  }

  /// Adds the bias to the lane's columns of a subtile: two of every eight.
  template <int subtile>
  __device__ __forceinline__ void add_bias(Values<subtile>& x, const Vector& bias) const {
    if (bias.data == nullptr) return;
    const auto at = [&](int n) { return n < arguments.n ? bias_at<T>(bias, n) : 0.0f; };
#pragma unroll
    for (int n = 0; n < chunks_of(subtile); ++n) {
      const int first = column_of(subtile) + 8 * n + lane % 4 * 2;
      const float low = at(first);
      const float high = at(first + 1);
      x[4 * n] += low;
      x[4 * n + 1] += high;
      x[4 * n + 2] += low;
      x[4 * n + 3] += high;
    }
  }

  template <int subtile>
  __device__ __forceinline__ void add_residual(Values<subtile>& x) const {
    if (arguments.epilogue.residual.data == nullptr) return;
    wait_copies<(subtile + 1 < subtiles ? 1 : 0)>();  // the next subtile's copies may still run
    __syncwarp();                                     // the copies of other lanes have arrived, too
#pragma unroll
    for (int group = 0; group < (chunks_of(subtile) + 1) / 2; ++group) {
      std::uint32_t four[4];
      load_matrices(four, slab_address(subtile, group));
#pragma unroll
      for (int e = 0; e < (2 * group + 1 < chunks_of(subtile) ? 4 : 2); ++e) {
        const float2 two = unpack<T>(four[e]);
        x[8 * group + 2 * e] += two.x;
        x[8 * group + 2 * e + 1] += two.y;
      }
    }
    __syncwarp();  // all lanes have read the residual, so results may overwrite it
  }

  /// A lane's elements of a subtile, rounded, two in each word.
  template <int subtile>
  using Words = std::uint32_t[2 * chunks_of(subtile)];

  template <int subtile>
  __device__ __forceinline__ static void round(std::uint32_t* words, const Values<subtile>& x) {
#pragma unroll
    for (int n = 0; n < 2 * chunks_of(subtile); ++n) words[n] = pack<T>(x[2 * n], x[2 * n + 1]);
  }

  /// Puts rounded results into a slab and starts its TMA store.
  template <int subtile>
  __device__ __forceinline__ void write(const std::uint32_t* words) const {
    // The slab was last used two subtiles ago. If a tile has an odd number of subtiles, the last one of the
    // tile before and the first of this one use the same slab.
    wait_for_slabs<(subtile == 0 && subtiles % 2 == 1 ? 0 : 1)>();
#pragma unroll
    for (int group = 0; group < (chunks_of(subtile) + 1) / 2; ++group) {
      const bool whole = 2 * group + 1 < chunks_of(subtile);  // else the second eight columns are not copied
      const std::uint32_t* const at = words + 4 * group;
      const std::uint32_t four[4] = {at[0], at[1], whole ? at[2] : 0, whole ? at[3] : 0};
      store_matrices(slab_address(subtile, group), four);
    }
    fence_async_proxy();  // makes the slab visible to TMA
    __syncwarp();         // all lanes have written theirs before lane 0 starts the store
    if (lane == 0) {
      store_box(chunks_of(subtile) == 8 ? maps.out : maps.out_tail, slab_of(subtile), column_of(subtile),
                row_of(subtile));
      commit_stores();
    }
  }

  /// Writes a subtile in f32, half the columns at a time, and adds the residual.
  __device__ __forceinline__ void write_f32(const float (&x)[32], int subtile) const {
    std::byte* slab = slab_of(subtile);
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
      __syncwarp();  // all lanes have written theirs: 16 rows of 32 columns are complete
      const int chunk = lane % 8;
      const int at_column = column_of(subtile) + 32 * half + 4 * chunk;
#pragma unroll 1
      for (int r = lane / 8; r < 16; r += 4) {
        const int at_row = row_of(subtile) + r;
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
      __syncwarp();  // all lanes have read the slab, so it may be overwritten
    }
  }

  /// Bias, activation and gate of a subtile; the residual is added later.
  template <int subtile>
  __device__ __forceinline__ void finish_values(Values<subtile>& x,
                                                const Accumulators<c>& all_accumulators) const {
    const Epilogue& epilogue = arguments.epilogue;
    const float(&accumulators)[c.columns / 2] = all_accumulators[subtile / slabs];
    constexpr int first = subtile % slabs * 32;
    constexpr int count = 4 * chunks_of(subtile);
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] = accumulators[first + n];
    add_bias<subtile>(x, c.gated ? epilogue.gate_bias : epilogue.bias);
    activate_all<!c.out_f32>(x, epilogue.activation);
    if constexpr (c.gated) {
      Values<subtile> up;
#pragma unroll
      for (int n = 0; n < count; ++n) up[n] = accumulators[c.columns / 4 + first + n];
      add_bias<subtile>(up, epilogue.bias);
#pragma unroll
      for (int n = 0; n < count; ++n) x[n] *= up[n];
    }
  }

  /// Whether there is neither bias nor activation, in configurations that treat this case apart. There may be
  /// a residual.
  __device__ __forceinline__ bool bare() const {
    const Epilogue& epilogue = arguments.epilogue;
    return c.overlaps_epilogue() && !c.gated && epilogue.bias.data == nullptr &&
           epilogue.activation == Activation::none;
  }
  template <int subtile>
  __device__ __forceinline__ static void bare_values(Values<subtile>& x,
                                                     const Accumulators<c>& accumulators) {
#pragma unroll
    for (int n = 0; n < 4 * chunks_of(subtile); ++n)
      x[n] = accumulators[subtile / slabs][subtile % slabs * 32 + n];
  }

  template <int subtile>
  __device__ __forceinline__ void finish_bare_subtile(const Accumulators<c>& accumulators) const {
    Values<subtile> x;
    bare_values<subtile>(x, accumulators);
    Words<subtile> words;
    round<subtile>(words, x);
    write<subtile>(words);
  }
  template <int subtile>
  __device__ __forceinline__ void finish_subtile(const Accumulators<c>& accumulators) const {
    if constexpr (subtile + 1 < subtiles) fetch_residual<subtile + 1>();
    Values<subtile> x;
    finish_values<subtile>(x, accumulators);
    if constexpr (c.out_f32) {
      write_f32(x, subtile);
    } else {
      add_residual<subtile>(x);
      Words<subtile> words;
      round<subtile>(words, x);
      write<subtile>(words);
    }
  }

  /// Loads the lane's residuals of a subtile of the next tile: two of every eight columns, in two rows.
  template <int subtile>
  __device__ __forceinline__ void load_residual() {
    const Matrix& residual = arguments.epilogue.residual;
    const int at_row = next_row + subtile / slabs * 64 + lane / 4;
    const int at_column = next_column + subtile % slabs * 64 + lane % 4 * 2;
    const std::byte* from = residual.data + (at_row * residual.stride_row + at_column) * 2;
#pragma unroll
    for (int n = 0; n < chunks_of(subtile); ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool inside = at_row + 8 * half < arguments.m && at_column + 8 * n < arguments.n;
        kept[subtile][2 * n + half] =
            inside
                ? *reinterpret_cast<const std::uint32_t*>(from + 8 * half * residual.stride_row * 2 + 16 * n)
                : 0;
      }
    }
  }

  /// Adds the residual, which is in `kept`, and keeps the rounded results there.
  template <int subtile>
  __device__ __forceinline__ void round_and_keep(Values<subtile>& x, bool residual) {
    if (residual) {
#pragma unroll
      for (int n = 0; n < 2 * chunks_of(subtile); ++n) {
        const float2 two = unpack<T>(kept[subtile][n]);
        x[2 * n] += two.x;
        x[2 * n + 1] += two.y;
      }
    }
    round<subtile>(kept[subtile], x);
  }
  template <int subtile>
  __device__ __forceinline__ void keep_subtile(const Accumulators<c>& accumulators) {
    Values<subtile> x;
    finish_values<subtile>(x, accumulators);
    round_and_keep<subtile>(x, arguments.epilogue.residual.data != nullptr);
  }
  /// The same where bare().
  template <int subtile>
  __device__ __forceinline__ void keep_bare_subtile(const Accumulators<c>& accumulators, bool residual) {
    Values<subtile> x;
    bare_values<subtile>(x, accumulators);
    round_and_keep<subtile>(x, residual);
  }

  template <typename Body>
  static __device__ __forceinline__ void for_each_subtile(const Body& body) {
    [&]<int... subtile>(std::integer_sequence<int, subtile...>) {
      (body.template operator()<subtile>(), ...);
    }(std::make_integer_sequence<int, subtiles>{});
  }

  /// A step that overlaps with the mainloop: stores a subtile of the tile before, or loads residuals of a
  /// subtile of this one, or both.
  template <int number>
  __device__ __forceinline__ void step() {
    constexpr int subtile = number % subtiles;
    constexpr bool writes = number < subtiles, loads = !writes || !c.overlaps_epilogue();
    if (writes && is_kept) write<subtile>(kept[subtile]);
    if (loads && arguments.epilogue.residual.data != nullptr) load_residual<subtile>();
    if (writes && subtile + 1 == subtiles) move_on();
  }
  __device__ __forceinline__ void move_on() {
    row = next_row;
    column = next_column;
  }

  /// Called before a tile's mainloop.
  __device__ __forceinline__ void begin(int first_row, int first_column) {
    next_row = first_row;
    next_column = first_column;
    if constexpr (!keeps) {
      move_on();
      fetch_residual<0>();
    }
  }
  /// Called after it. The tensor cores are idle meanwhile, so the bare case has straight code without
  /// branches, except in narrow tiles.
  __device__ __forceinline__ void finish(const Accumulators<c>& accumulators) {
    const bool residual = arguments.epilogue.residual.data != nullptr;
    if constexpr (keeps) {
      is_kept = true;
      if (bare() && !residual) {
        for_each_subtile([&]<int subtile>() { keep_bare_subtile<subtile>(accumulators, false); });
      } else if (bare()) {
        for_each_subtile([&]<int subtile>() { keep_bare_subtile<subtile>(accumulators, true); });
      } else {
        for_each_subtile([&]<int subtile>() { keep_subtile<subtile>(accumulators); });
      }
    } else if constexpr (!c.out_f32) {
      if (bare() && !residual) {
        for_each_subtile([&]<int subtile>() { finish_bare_subtile<subtile>(accumulators); });
      } else {
        for_each_subtile([&]<int subtile>() { finish_subtile<subtile>(accumulators); });
      }
    } else {
      for_each_subtile([&]<int subtile>() { finish_subtile<subtile>(accumulators); });
    }
  }
  /// Called before the CTA exits: stores what is kept, and waits until TMA has read the slabs.
  __device__ __forceinline__ void end() {
    if constexpr (keeps) {
      if (is_kept) for_each_subtile([&]<int subtile>() { write<subtile>(kept[subtile]); });
    }
    wait_for_slabs<0>();
  }
};

}  // namespace tilewise::cuda::gemm
