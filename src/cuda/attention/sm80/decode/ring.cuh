#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/common/forward/query_rows.cuh"
#include "cuda/attention/sm80/decode/config.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace tilewise::cuda::mma {

// How a warp's ring of K and V tiles is filled.

/// Those of a step's 16 keys that are read: [first, last).
struct PresentKeys {
  int first, last;
  __device__ bool all(int keys) const { return first <= 0 && last >= keys; }
};

/// Walks over the steps of a warp. `next` is ahead of what is computed by as many steps as there are stages.
template <bool paged, typename C>
struct KeySteps {
  static constexpr int stride = C::step_keys;  ///< from one step of the warp to its next
  const AttentionCall& call;
  const std::uint32_t b;
  const std::byte *k, *v;  ///< of the head: the sequence's first key, or the pool's first page
  int first, last;         ///< the keys that some query of the CTA sees, up to the split's end
  int own;                 ///< the first of the warp's first 16 keys; some may lie outside [first, last)
  int next;                ///< the first of the 16 keys to load next
  std::int32_t page = 0;   ///< the page of these
  std::int32_t later = 0;  ///< the page of the 16 keys after these, loaded a step ahead

  __device__ KeySteps(const AttentionCall& call_, const QueryRows& rows, int split, int splits)
      : call(call_), b(static_cast<std::uint32_t>(rows.queries.b)) {
    const Sequence& sequence = rows.queries.sequence;
    k = call.k.data + (paged ? 0 : row_offset(call.k, sequence)) + rows.head_kv * call.k.stride_h * 2;
    v = call.v.data + (paged ? 0 : row_offset(call.v, sequence)) + rows.head_kv * call.v.stride_h * 2;
    const KeyRange range = rows.queries.any(call);
    const auto begin = static_cast<int>(range.first) / C::keys * C::keys;
    const auto end = static_cast<int>(range.last);
    const int tiles = end > begin ? (end - begin + C::keys - 1) / C::keys : 0;
    const int share = (tiles + splits - 1) / splits * C::keys;
    own = begin + split * share + static_cast<int>(threadIdx.x) / 32 * C::keys;
    first = static_cast<int>(range.first);
    last = min(end, begin + (split + 1) * share);
    next = own;
    page = page_of(next);
    later = page_of(next + stride);
  }
  __device__ bool more() const { return next < last; }
  __device__ void advance() {
    next += stride;
    page = later;
    later = page_of(next + stride);
  }
  __device__ PresentKeys present() const { return {first - next, last - next}; }
  /// The address of the next keys in the rows of a head.
  __device__ const std::byte* at(const std::byte* head, const Rows& rows) const {
    if constexpr (!paged) return head + next * (rows.stride_s * 2);
    const std::uint32_t inside = static_cast<std::uint32_t>(next) % static_cast<std::uint32_t>(call.page);
    return head + (page * rows.stride_b + inside * rows.stride_s) * 2;
  }

 private:
  __device__ std::int32_t page_of(int key) const {
    if (!paged || key >= last) return 0;
    const std::uint32_t slot = static_cast<std::uint32_t>(key) / static_cast<std::uint32_t>(call.page);
    return static_cast<std::int32_t>(call.page_at(b, slot));
  }
  __device__ std::int64_t row_offset(const Rows& rows, const Sequence& sequence) const {
    return (b * rows.stride_b + sequence.first_k * rows.stride_s) * 2;
  }
};

/// A warp's copies of K or V tiles, [keys, dim], into its ring.
template <int dim, int keys>
struct TileCopy {
  using Tile = SwizzledTile<dim>;
  static constexpr int rows_at_once = 32 / Tile::chunks;
  const std::int64_t stride;  ///< in bytes, from key to key
  int row;                    ///< the first of the lane's rows
  std::int64_t from;          ///< the lane's first 16 bytes, from the tile's first key on
  int to;                     ///< where they go in the tile

  __device__ explicit TileCopy(std::int64_t stride_) : stride(stride_) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row = lane / Tile::chunks;
    from = row * stride + lane % Tile::chunks * 16;
    to = Tile::offset(row, lane % Tile::chunks);
  }
  /// Begins the copy of the keys from `first` on; keys that are not present become 0.
  __device__ __forceinline__ void begin(std::byte* tile_smem, const std::byte* first,
                                        const PresentKeys& present) const {
    const std::byte* source = first + from;
    const auto copy = [&](int r, bool valid) {
      // Row r has a swizzle of its own. `row` and r have no bit in common, so one exclusive or changes `to`.
      copy_async_16(tile_smem + (to ^ r % 8 * 16) + r * Tile::row_bytes, source, valid);
      source += rows_at_once * stride;
    };
    if (present.all(keys)) {
#pragma unroll
      for (int r = 0; r < keys; r += rows_at_once) copy(r, true);
    } else {
#pragma unroll
      for (int r = 0; r < keys; r += rows_at_once) {
        copy(r, row + r >= present.first && row + r < present.last);
      }
    }
  }
};

/// A warp's ring. Each stage has the K tile and the V tile of a step, whose copies are a group each.
template <int dim, bool paged, typename C>
struct KeyRing {
  static constexpr int stages = C::stages(dim);
  static constexpr int tile_bytes = C::tile_bytes(dim);
  static constexpr int stage_bytes = 2 * tile_bytes;
  std::byte* const smem;
  KeySteps<paged, C> steps;
  const TileCopy<dim, C::keys> copy_k, copy_v;

  __device__ KeyRing(std::byte* smem_, const AttentionCall& call, const QueryRows& rows, int split,
                     int splits)
      : smem(smem_),
        steps(call, rows, split, splits),
        copy_k(call.k.stride_s * 2),
        copy_v(call.v.stride_s * 2) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      load_k(stage * stage_bytes);
      load_v(stage * stage_bytes);
    }
  }
  /// Begins to copy the next step's K into the stage at an offset, and then its V.
  __device__ __forceinline__ void load_k(int stage_at) {
    if (steps.more()) copy_k.begin(smem + stage_at, steps.at(steps.k, steps.call.k), steps.present());
    commit_copies();
  }
  __device__ __forceinline__ void load_v(int stage_at) {
    if (steps.more()) {
      copy_v.begin(smem + stage_at + tile_bytes, steps.at(steps.v, steps.call.v), steps.present());
    }
    commit_copies();
    steps.advance();
  }
  /// Waits for the oldest tile. It stays the oldest until the next load, so that all others remain in flight.
  __device__ __forceinline__ static void wait() {
    wait_copies<2 * stages - 1>();
    __syncwarp();  // the copies of all lanes are there
  }
};

}  // namespace tilewise::cuda::mma
