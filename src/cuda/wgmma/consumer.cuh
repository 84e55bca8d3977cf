#pragma once

#include "cuda/wgmma/loaders.cuh"
#include "cuda/wgmma/output.cuh"

namespace tilewise::cuda::wgmma {

/// A warpgroup that computes. It has 64 queries of each of the block's tiles and keeps their scores, weights
/// and o in registers. Tensor cores make the scores of a tile of keys and add the values of the one before
/// while other consumers do softmax:
///
///   scores[n]   start ── wait ─ hide ─ raise ─ weigh ──────────────── round
///   output[n+1]      start ─────────────────────────────────── wait ─────── rescale
///
/// Tiles of keys come from the last to the first. Those of the block that none of its own queries sees it
/// lets go unread, so that it computes no tile that is hidden as a whole.
template <typename T, ForwardConfig c>
struct Consumer {
  const ForwardArguments& arguments;
  const SharedMemory<c>& shared;
  Barriers<c>& barriers;
  const int index;                              ///< of the consumers
  const int first_row;                          ///< of the warp's, among the consumer's
  const TileDescriptor q_tile, k_tile, v_tile;  ///< the first place of each
  Ring<c.query_stages> q;
  Ring<c.stages> k, v;

  Scores<c> s;
  Weights<c> weights;
  Output<c> o;
  Softmax<c> softmax;

  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  __device__ __forceinline__ Consumer(const ForwardArguments& arguments_, const SharedMemory<c>& shared_,
                                      int index_, int warp)
      : arguments(arguments_),
        shared(shared_),
        barriers(shared_.barriers()),
        index(index_),
        first_row(warp * 16),
        q_tile(describe_tile(address(shared_.queries(0, index_)), 0)),
        k_tile(describe_tile(address(shared_.keys(0)), 0)),
        v_tile(describe_tile(address(shared_.values(0)), c.keys * 128)),
        softmax(arguments_.scale_log2) {
#pragma unroll
    for (int n = 0; n < c.keys / 2; ++n) s[n] = 0;
  }

  /// One lane arrives for its warp.
  static __device__ __forceinline__ void let_go(Mbarrier* empty) {
    if (threadIdx.x % 32 == 0) arrive(empty);
  }
  __device__ __forceinline__ void let_go_of_keys() {
    let_go(&barriers.k_empty[k.stage()]);
    k.advance();
  }
  __device__ __forceinline__ void let_go_of_values() {
    let_go(&barriers.v_empty[v.stage()]);
    v.advance();
  }
  /// Lets tiles of keys and values go unread. They are waited for: an arrival belongs to its phase.
  __device__ __forceinline__ void pass_by(int tiles) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers.k_full[k.stage()], k.parity());
      let_go_of_keys();
      wait(&barriers.v_full[v.stage()], v.parity());
      let_go_of_values();
    }
  }

  __device__ __forceinline__ void start_scores_of_next_keys() {
    wait(&barriers.k_full[k.stage()], k.parity());
    start_scores<T, c>(s, q_tile + q.stage() * (c.consumers * c.query_place() / 16),
                       k_tile + k.stage() * (c.key_bytes() / 16));
  }
  __device__ __forceinline__ void start_output_of_next_values() {
    wait(&barriers.v_full[v.stage()], v.parity());
    start_output<T, c>(o, weights, v_tile + v.stage() * (c.value_bytes() / 16));
  }

  /// Walks over tiles of keys, of which there is at least one, for queries [first, end).
  __device__ __forceinline__ void walk(const TileSpan& tiles, int first, int end) {
    const BandOfKeys& band = arguments.band;
    const int all_first = band.first(end - 1);  // keys that every query sees
    const int all_last = band.last(first);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int query = first + first_row + lane / 4;
    const auto hide_in = [&](int n) {
      const int key = n * c.keys;
      if (key < all_first || key + c.keys > all_last) hide<c>(s, band, query, key + lane % 4 * 2);
    };

    start_scores_of_next_keys();
    wait_products<0>();
    pin(s);
    let_go_of_keys();
    hide_in(tiles.last - 1);
    softmax.raise(s);
    softmax.weigh(s);
    softmax.set_limits();
    round_weights<T, c>(weights, s);
#pragma unroll 1
    for (int n = tiles.last - 2; n >= tiles.first; --n) {
      start_scores_of_next_keys();
      start_output_of_next_values();
      wait_products<1>();  // for the scores
      pin(s);
      let_go_of_keys();
      hide_in(n);
      const bool raised = softmax.raise(s);
      softmax.weigh(s);
      pin(s);
      wait_products<0>();  // o is here, and weights are free
      pin(o);
      let_go_of_values();
      round_weights<T, c>(weights, s);
      if (raised) {
        softmax.rescale(o);
        softmax.set_limits();
      }
    }
    start_output_of_next_values();
    wait_products<0>();
    pin(o);
    let_go_of_values();
  }

  /// All of a tile of queries. Whatever it sees, each place of the block's tile is waited for and let go
  /// once.
  __device__ __forceinline__ void compute(const QueryTile& tile) {
    const int first = tile.first + 64 * index;
    const int end = min(first + 64, arguments.band.length_q);
    const WarpRows rows(arguments, tile.b, tile.h, first + first_row);
    if (tile.keys.count() == 0) return write_nothing(arguments, rows);
    TileSpan own = arguments.band.tiles(first, end, c.keys);
    if (own.count() == 0) own = {tile.keys.first, tile.keys.first};
    softmax.start();
#pragma unroll
    for (int n = 0; n < c.dim_v / 2; ++n) o[n] = 0;
    wait(&barriers.q_full[q.stage()][index], q.parity());
    pass_by(tile.keys.last - own.last);
    if (own.count() > 0) walk(own, first, end);
    pass_by(own.first - tile.keys.first);
    write_output<T, c>(arguments, rows, softmax, o, shared.queries(q.stage(), index), first_row);
    fence_async_proxy();  // before the next queries are copied to where o was
    __syncwarp();
    let_go(&barriers.q_empty[q.stage()][index]);
    q.advance();
  }
};

}  // namespace tilewise::cuda::wgmma
