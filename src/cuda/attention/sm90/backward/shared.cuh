#pragma once

#include "cuda/attention/sm90/backward/config.h"
#include "cuda/attention/sm90/backward/walk.cuh"
#include "cuda/attention/sm90/panel_tile.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace tilewise::cuda::wgmma_backward {

enum NamedBarrier {
  both_consumers = 1,
  all_producers = 2,
  first_turn = 3,  ///< and 4: consumer 0 or 1 may compute P (Config::turns)
  words_written = 5,
};

/// A query tile of the CTA's walk.
struct Step {
  int head_q, tile;
  int n;       ///< number in the walk
  int block;   ///< listed: the tile of the block mask, or block_full
  int masked;  ///< listed: number of earlier tiles with a mask or bits of a block mask
};

static_assert(sizeof(Step) + sizeof(Visible) <= Config::step_bytes);

/// Values that a CTA's threads read from shared memory.
struct Words {
  std::uint32_t index;  ///< the CTA's index, if CTAs are numbered as they start
  // Dropout's key and stream, the CTA's first key, and its first head among those of all entries. Producers
  // have too few registers to keep them.
  std::uint32_t key_low, key_high, stream;
  int first_key, first_head;
  /// Plain, with padding: the keys that it hides, a bit for each of the 16 keys of a consumer warp.
  std::uint16_t hidden_keys[Config::consumer_warps];
};
static_assert(sizeof(Words) == Config::word_bytes);

/// A CTA's shared memory. Buffers of TMA and wgmma have an alignment of 1024 bytes.
///
/// These are pointers, since with one struct of rows and barriers ptxas 13.0 keeps the base of the struct in
/// a register: at dim 128, the general kernel then spilled 8 bytes per thread.
template <Config c>
struct Shared {
  using KeyPanels = PanelTile<64 * c.panels(), c.keys>;
  using ValuePanels = PanelTile<64 * c.panels_v(), c.keys>;
  using QueryPanels = PanelTile<64 * c.panels(), c.queries>;
  using GradientPanels = PanelTile<64 * c.panels_v(), c.queries>;  ///< panels of dO
  using DsPanels = PanelTile<c.queries, c.keys>;

  std::byte* k;     ///< [keys, dim]; finally dK
  std::byte* v;     ///< [keys, dim_v]; finally dV
  std::byte* q;     ///< q_stages x [queries, dim]
  std::byte* d_o;   ///< d_o_stages x [queries, dim_v]
  std::byte* ds;    ///< ds_stages x [keys, queries]
  std::byte* p;     ///< wide: ds_stages x [keys, queries]
  float* dq;        ///< [dq_buffers, 4 warps, warp_dq_floats]
  std::byte* mask;  ///< general: mask_stages x boxes of [queries, 128 bytes of keys]
  /// listed: mask_stages x [kept_words, queries] or four words, one bit per key: the block mask shows the
  /// pair
  std::uint32_t* seen;
  std::uint32_t*
      kept;       ///< may_drop: kept_stages x [kept_words, queries], one bit per key: dropout keeps the pair
  float* lse;     ///< q_stages x [queries]
  float* delta;   ///< d_o_stages x [queries]
  float* offset;  ///< general: q_stages x [queries]
  Mbarrier* q_full;      ///< [q_stages]: Q and the values of its rows have arrived
  Mbarrier* d_o_full;    ///< [d_o_stages]: dO and delta have arrived
  Mbarrier* q_empty;     ///< [q_stages]: all consumers have released the stage
  Mbarrier* d_o_empty;   ///< [d_o_stages]
  Mbarrier* keys_full;   ///< K and V have arrived
  Mbarrier* dq_full;     ///< [consumers]: a consumer's dQ is stored
  Mbarrier* dq_empty;    ///< [consumers]: the producer has read it
  Mbarrier* ds_full;     ///< lagged: [2], dS of both consumers is stored
  Mbarrier* ds_empty;    ///< lagged: [2], no product of either consumer reads it any more
  Mbarrier* mask_full;   ///< published: [most_mask_stages], the mask and `seen` have arrived
  Mbarrier* mask_empty;  ///< published: [most_mask_stages]
  Mbarrier* kept_full;   ///< may_drop: [2]
  Mbarrier* kept_empty;  ///< may_drop: [2]
  Words* words;
  Step* steps;       ///< published: [q_stages], the tile whose Q is in the stage
  Visible* visible;  ///< published: [q_stages], the keys that its queries see

  /// `mask_bytes` and `seen_bytes` count all stages.
  __device__ Shared(std::byte* first, int mask_bytes, int seen_bytes)
      : k(first),
        v(k + c.k_bytes()),
        q(v + c.v_bytes()),
        d_o(q + c.q_stages * c.q_bytes()),
        ds(d_o + c.d_o_stages * c.d_o_bytes()),
        p(ds + c.ds_stages * c.ds_bytes()),
        dq(reinterpret_cast<float*>(c.wide() ? p + c.ds_stages * c.ds_bytes() : p)),
        mask(reinterpret_cast<std::byte*>(dq + c.dq_buffers() * 4 * c.warp_dq_floats()) + c.value_bytes()),
        seen(reinterpret_cast<std::uint32_t*>(mask + mask_bytes)),
        kept(reinterpret_cast<std::uint32_t*>(mask + mask_bytes + seen_bytes)),
        lse(dq + c.dq_buffers() * 4 * c.warp_dq_floats()),
        delta(lse + c.q_stages * c.queries),
        offset(delta + c.q_stages * c.queries),
        q_full(reinterpret_cast<Mbarrier*>(lse + c.row_values() * c.q_stages * c.queries)),
        d_o_full(q_full + c.q_stages),
        q_empty(d_o_full + c.d_o_stages),
        d_o_empty(q_empty + c.q_stages),
        keys_full(d_o_empty + c.d_o_stages),
        dq_full(keys_full + 1),
        dq_empty(dq_full + 2),
        ds_full(dq_empty + 2),
        ds_empty(ds_full + (c.lagged() ? 2 : 0)),
        mask_full(ds_empty + (c.lagged() ? 2 : 0)),
        mask_empty(mask_full + c.most_mask_stages),
        kept_full(mask_full + (c.published() ? 2 * c.most_mask_stages : 0)),
        kept_empty(kept_full + 2),
        words(reinterpret_cast<Words*>(q_full + c.barriers())),
        steps(reinterpret_cast<Step*>(words + 1)),
        visible(reinterpret_cast<Visible*>(steps + c.q_stages)) {}

  /// `dropout_warps` warps fill `kept`.
  __device__ void init_barriers(int dropout_warps) const {
    for (int n = 0; n < c.q_stages; ++n) {
      init_barrier(q_full + n, 1);
      init_barrier(q_empty + n, c.consumer_warps);
    }
    for (int n = 0; n < c.d_o_stages; ++n) {
      init_barrier(d_o_full + n, 1);
      init_barrier(d_o_empty + n, c.consumer_warps);
    }
    init_barrier(keys_full, 1);
    for (int n = 0; n < c.consumers; ++n) {
      init_barrier(dq_full + n, c.consumer_warps / c.consumers);
      init_barrier(dq_empty + n, 1);
    }
    if constexpr (c.lagged()) {
      for (int n = 0; n < 2; ++n) {
        init_barrier(ds_full + n, c.consumer_warps);
        init_barrier(ds_empty + n, c.consumer_warps);
      }
    }
    if constexpr (c.published()) {
      for (int n = 0; n < c.most_mask_stages; ++n) {
        init_barrier(mask_full + n, 1);
        init_barrier(mask_empty + n, c.consumer_warps);
      }
    }
    if constexpr (c.may_drop()) {
      for (int n = 0; n < 2; ++n) {
        init_barrier(kept_full + n, dropout_warps);
        init_barrier(kept_empty + n, c.consumer_warps);
      }
    }
    fence_barrier_inits();
  }
  static __device__ TileDescriptor tile(const std::byte* smem, int panel_bytes) {
    return describe_tile(static_cast<std::uint32_t>(__cvta_generic_to_shared(smem)), panel_bytes);
  }
};

/// Starts x = K·Qᵀ or V·dOᵀ of 64 keys and a consumer's queries, or x += that product if `adds`.
template <typename T, Config c, int dims, bool adds = false>
__device__ __forceinline__ void start_scores(float (&x)[c.own_queries() / 2], const std::byte* keys_smem,
                                             const std::byte* rows_smem, int consumer) {
  using Keys = typename Shared<c>::KeyPanels;
  using Queries = typename Shared<c>::QueryPanels;
  const int first_key = c.wide() ? 0 : 64 * consumer;
  const int first_query = c.wide() ? consumer * c.own_queries() : 0;
  const TileDescriptor a = Shared<c>::tile(keys_smem + first_key * 128, Keys::panel_bytes);
  const TileDescriptor b = Shared<c>::tile(rows_smem + first_query * 128, Queries::panel_bytes);
  if constexpr (!adds) forget(x);
  fence_products();
#pragma unroll
  for (int step = 0; step < dims / 16; ++step) {
    const int inside = step % 4 * 2;
    WarpgroupProduct<T, c.own_queries()>::from_shared(x, a + step / 4 * (Keys::panel_bytes / 16) + inside,
                                                      b + step / 4 * (Queries::panel_bytes / 16) + inside,
                                                      adds || step > 0);
  }
  commit_products();
}

}  // namespace tilewise::cuda::wgmma_backward
