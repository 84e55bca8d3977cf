#pragma once

#include "cuda/attention/simt/backward/stage.cuh"

namespace tilewise::cuda::simt {

/// How backward cuts a problem into CTAs.
struct Blocks {
  QueryGrid queries;
  KeyGrid keys;
  int dim_pieces = 1;  // of the longer of D and Dv, each with a CTA of its own
};

/// The pairs of a query tile and a key tile that one CTA computes, in order.
template <Side side, bool general>
class Pairs;

/// The CTA keeps a key tile. It walks over every query tile that sees these keys, through all query heads of
/// the group, one head after another.
template <bool general>
class Pairs<Side::keys, general> {
 public:
  QueryTile query;
  KeyTile keys;

  __device__ Pairs(const AttentionCall& call, const Blocks& blocks, std::uint32_t index)
      : call_(call), blocks_(blocks) {
    const Turn turn =
        Turns::of(call, call.problem.batch * call.problem.heads_kv, blocks.keys.tiles).turn(index);
    const auto [b, h_kv] = turn.among(call.problem.heads_kv);
    query.b = b;
    query.h = h_kv * call.group();
    query.sequence = call.sequence(query.b);
    keys = blocks.keys.tile(call, query.sequence, turn.tile);
    next_h_ = query.h;
    last_h_ = query.h + call.group();
    // Query i sees a key of the tile if i + offset − left < the tile's end and i + offset + right >= its
    // begin.
    const std::int64_t position = keys.first - query.sequence.band_offset;
    const std::int64_t first = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t last = min(query.sequence.length_q, position + keys.count + call.band.left);
    first_ = general ? 0 : first / blocks.queries.size;
    last_ = general           ? blocks.queries.tiles
            : keys.count <= 0 ? first_
                              : (last + blocks.queries.size - 1) / blocks.queries.size;
    next_ = first_;
  }
  __device__ bool next() {
    for (; next_h_ < last_h_; ++next_h_, next_ = first_) {
      while (next_ < last_) {
        query = blocks_.queries.tile(call_, query.b, next_h_, next_++);
        if (!general || meets<true>(call_, query, keys)) return true;
      }
    }
    return false;
  }

 private:
  const AttentionCall& call_;
  const Blocks& blocks_;
  std::int64_t first_, last_, next_;  // query tiles
  std::int64_t next_h_, last_h_;
};

/// The CTA keeps a query tile and walks over every key tile that these queries see. The last query tiles come
/// first: with causal they see the most keys.
template <bool general>
class Pairs<Side::queries, general> {
 public:
  QueryTile query;
  KeyTile keys;

  __device__ Pairs(const AttentionCall& call, const Blocks& blocks, std::uint32_t index)
      : query(tile_of(
            call, blocks.queries,
            Turns::of(call, call.problem.batch * call.problem.heads_q, blocks.queries.tiles).turn(index))),
        tiles_(call, query, blocks.keys.size) {}
  __device__ bool next() {
    keys = query.count > 0 ? tiles_.next() : KeyTile{};
    return keys.count > 0;
  }

 private:
  __device__ static QueryTile tile_of(const AttentionCall& call, const QueryGrid& grid, const Turn& turn) {
    const auto [b, h] = turn.among(call.problem.heads_q);
    return grid.tile(call, b, h, grid.tiles - 1 - turn.tile);
  }

  KeyTiles<general> tiles_;
};

}  // namespace tilewise::cuda::simt
