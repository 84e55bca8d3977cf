#pragma once

#include <cstddef>

namespace tilewise::cuda::mma {

/// How a block of the backward kernel is cut. It keeps a tile of keys and walks over tiles of queries. Each
/// of the products has its own way of being shared among the warps.
struct BackwardConfig {
  int dim = 0;  ///< the head dims, both, are filled up to it; a power of two
  int warps = 8;
  int queries = 64;            ///< a tile
  int keys = 128;              ///< of a block
  int key_warps = 4;           ///< k·qᵀ and v·d_oᵀ: warps along the keys; the others along the queries
  int queries_at_once = 32;    ///< of those of a warp
  int dim_warps = 2;           ///< dk and dv: warps along the dims; the others along the keys
  int dq_dim_warps = 4;        ///< dq: the same, the others along the queries
  bool weights_stay = false;   ///< in registers, for dk and dv; a warp has its keys for itself then
  bool pairs_ahead = false;    ///< the next tile's pairs are made beside this one's sums
  int stages = 2;              ///< of queries; with three, pairs ahead need one barrier a tile instead of two
  int blocks = 1;              ///< a multiprocessor, at least
  bool matrix_stores = false;  ///< on sm_90, of pairs: fewer instructions, but other addresses

  constexpr int threads() const { return warps * 32; }
  // Tiles of 16 x 16 a warp has in each product, along its first and its second side.
  constexpr int pair_key_tiles() const { return keys / key_warps / 16; }
  constexpr int pair_query_tiles() const { return queries_at_once / 16; }
  constexpr int own_key_tiles() const { return keys / (warps / dim_warps) / 16; }
  constexpr int own_dim_tiles() const { return dim / dim_warps / 16; }
  constexpr int dq_query_tiles() const { return queries / (warps / dq_dim_warps) / 16; }
  constexpr int dq_dim_tiles() const { return dim / dq_dim_warps / 16; }

  constexpr int key_bytes() const { return keys * dim * 2; }       ///< of k, or of v
  constexpr int query_bytes() const { return queries * dim * 2; }  ///< a stage of q, or of d_o
  constexpr int pair_bytes() const { return keys * queries * 2; }  ///< weights, or score gradients
  static constexpr int fact_bytes = 112;                           ///< of what a block knows of its queries
  constexpr int state_bytes() const { return queries * 4; }        ///< a stage of one number a query
  constexpr int dscores_stages() const { return pairs_ahead ? 2 : 1; }
  constexpr int weights_stages() const { return weights_stay ? 0 : pairs_ahead && stages > 2 ? 2 : 1; }
  constexpr int slope_bytes() const { return threads() * pair_key_tiles() * pair_query_tiles() * 32; }
  /// The general kernel has one number a query more, and one for each pair that is in registers.
  constexpr std::size_t shared_bytes(bool general) const {
    const int more = stages * state_bytes() + slope_bytes();
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * (query_bytes() + state_bytes()) +
                                    (dscores_stages() + weights_stages()) * pair_bytes() + fact_bytes +
                                    (general ? more : 0));
  }
  template <typename To>
  constexpr void describe(To& to) const {
    to.numbers("dim warps queries keys key_warps queries_at_once dim_warps dq_dim_warps stages blocks", dim,
               warps, queries, keys, key_warps, queries_at_once, dim_warps, dq_dim_warps, stages, blocks);
    to.words("weights_stay pairs_ahead matrix_stores", weights_stay, pairs_ahead, matrix_stores);
  }
  friend constexpr bool operator==(const BackwardConfig&, const BackwardConfig&) = default;
};

}  // namespace tilewise::cuda::mma
