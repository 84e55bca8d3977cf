#pragma once

#include <cstddef>

namespace tilewise::cuda::mma {

/// The tile sizes of the backward kernel. A CTA keeps a K tile and walks over Q tiles. Each of the products
/// is divided among the warps in its own way.
struct BackwardConfig {
  int dim = 0;  ///< both head dims are padded to it; a power of two
  int warps = 8;
  int queries = 64;           ///< per Q tile
  int keys = 128;             ///< per CTA
  int key_warps = 4;          ///< S and dP: warps along the keys; the others stand along the queries
  int queries_at_once = 32;   ///< of those of a warp, in S and dP
  int dim_warps = 2;          ///< dK and dV: warps along the dims; the others stand along the keys
  int dq_dim_warps = 4;       ///< dQ: warps along the dims; the others stand along the queries
  bool weights_stay = false;  ///< P and dS stay in registers for dV and dK; each warp has its own keys
  bool pairs_ahead = false;   ///< P and dS of the next Q tile are computed beside the products of this one
  int stages = 2;  ///< of Q and dO; with three, pairs_ahead needs one barrier per tile instead of two
  int blocks = 1;  ///< CTAs per SM, at least
  bool matrix_stores = false;  ///< stmatrix for P and dS, on sm_90: fewer instructions, but other addresses

  constexpr int threads() const { return warps * 32; }
  // Tiles of 16 x 16 per warp in each product, along M and along N.
  constexpr int score_key_tiles() const { return keys / key_warps / 16; }
  constexpr int score_query_tiles() const { return queries_at_once / 16; }
  constexpr int dkv_key_tiles() const { return keys / (warps / dim_warps) / 16; }
  constexpr int dkv_dim_tiles() const { return dim / dim_warps / 16; }
  constexpr int dq_query_tiles() const { return queries / (warps / dq_dim_warps) / 16; }
  constexpr int dq_dim_tiles() const { return dim / dq_dim_warps / 16; }

  constexpr int key_bytes() const { return keys * dim * 2; }        ///< K or V
  constexpr int query_bytes() const { return queries * dim * 2; }   ///< one stage of Q or dO
  constexpr int score_bytes() const { return keys * queries * 2; }  ///< one stage of P or dS
  static constexpr int fact_bytes = 112;                            ///< of CtaFacts
  constexpr int state_bytes() const { return queries * 4; }         ///< one stage of one number per query
  constexpr int ds_stages() const { return pairs_ahead ? 2 : 1; }
  constexpr int p_stages() const { return weights_stay ? 0 : pairs_ahead && stages > 2 ? 2 : 1; }
  constexpr int derivative_bytes() const { return threads() * score_key_tiles() * score_query_tiles() * 32; }
  /// The general kernel has one more number per query, and one for each element of S in registers.
  constexpr std::size_t shared_bytes(bool general) const {
    const int more = stages * state_bytes() + derivative_bytes();
    return static_cast<std::size_t>(2 * key_bytes() + 2 * stages * (query_bytes() + state_bytes()) +
                                    (ds_stages() + p_stages()) * score_bytes() + fact_bytes +
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
