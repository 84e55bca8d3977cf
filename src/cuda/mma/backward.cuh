#pragma once

#include "cuda/mma/backward_products.cuh"
#include "cuda/mma/backward_space.cuh"
#include "cuda/mma/backward_tuning.h"
#include "cuda/ptx/local.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/tile/key_grid.cuh"

namespace tilewise::cuda::mma {

// Backward on tensor cores by mma.sync. A block keeps a tile of keys and walks over the queries that see it:
// k·qᵀ and v·d_oᵀ again, weights and score gradients of them, and from those dv, dk and dq. dk and dv are
// summed in registers; dq is added to global memory as it comes, in whatever order.
//
// Pairs are held turned, a row a key: so they come out of the products in the registers in which they go into
// those for dv and dk. A warp that has keys for itself takes them from there; where keys are shared, they go
// by way of shared memory, so that a fragment of d_o or q serves more keys.

/// How a problem's keys are cut into blocks. With causal the first keys are seen by the most queries.
struct BackwardBlocks {
  KeyGrid keys;
  Turns turns;

  std::int64_t count() const { return std::int64_t{turns.heads} * turns.tiles; }

  static BackwardBlocks of(const AttentionCall& call, int keys, int multiprocessors) {
    const KeyGrid grid = KeyGrid::of(call, keys);
    // Queries, d_o and the sums of dq.
    const std::int64_t head_bytes =
        call.group() * call.problem.length_q * (6 * call.problem.dim_qk + 2 * call.problem.dim_v);
    return {grid, Turns::of(call, call.problem.batch * call.problem.heads_kv, grid.tiles, head_bytes,
                            multiprocessors)};
  }
};

/// What a block knows of the queries that see its keys. It lies in shared memory: registers are scarcer.
struct GroupFacts {
  const std::byte* q;  ///< of the group's first head and first query, as all of these
  const std::byte* d_o;
  std::int64_t row;  ///< where its values are
  std::int64_t low;  ///< keys that it sees, from and to, among those of the block
  std::int64_t high;
  int length;      ///< queries of a head
  int heads;       ///< of the group
  int first, end;  ///< tiles of queries that see some key

  __device__ GroupFacts(const AttentionCall& call, int b, int head_kv, int first_key, int key_count,
                        int size) {
    const Sequence sequence = call.sequence(b);
    const std::int64_t head = head_kv * call.group();
    q = row_of_halves(call.q, b, head, sequence.first_q);
    d_o = row_of_halves(call.d_o, b, head, sequence.first_q);
    row = head * call.rows_q() + call.first_row_q(b);
    // Queries i with i − left < the position of the keys' end, and i + right >= that of their beginning.
    const std::int64_t position = first_key - sequence.band_offset;
    low = -position - call.band.left;
    high = -position + call.band.right + 1;
    length = static_cast<int>(sequence.length_q);
    const std::int64_t first_query = max(std::int64_t{0}, position - call.band.right);
    const std::int64_t end_query = min(sequence.length_q, position + key_count + call.band.left);
    const bool any = first_query < end_query;
    heads = any ? static_cast<int>(call.group()) : 0;
    first = any ? static_cast<int>(first_query / size) : 0;
    end = any ? static_cast<int>((end_query + size - 1) / size) : 0;
  }
};

/// Walks over those queries a tile at a time, head by head of the group.
struct QuerySteps {
  int at;
  int head = 0;

  __device__ bool more(const GroupFacts& facts) const { return head < facts.heads; }
  __device__ void step(const GroupFacts& facts) {
    if (++at < facts.end) return;
    at = facts.first;
    ++head;
  }
};

/// Where a warp stands in a product whose warps are `along_n` side by side.
template <int along_n>
struct WarpPlace {
  int m, n;  ///< the warp's place along both sides

  __device__ explicit WarpPlace(int warp) : m(warp / along_n), n(warp % along_n) {}
};

template <typename T, BackwardConfig c>
struct BackwardBlock {
  using RowTile = SwizzledTile<c.dim>;
  using PairTile = SwizzledTile<c.queries>;
  using RowPointer = MatrixPointer<c.dim>;
  using PairPointer = MatrixPointer<c.queries>;
  using PairSums = Sums<c.pair_key_tiles(), c.pair_query_tiles()>;
  using OwnSums = Sums<c.own_key_tiles(), c.own_dim_tiles()>;

  const AttentionCall& call;
  const BackwardSpace& space;
  const int b, h;  ///< h of the keys
  int key_count;
  int first_key;  ///< in the sequence
  const int dim_qk, dim_v;
  const float unit;  ///< from products to exponents of 2; never 0
  const GradientScale scale;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // one number to the compiler
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* k_smem;        ///< [keys, dim]
  std::byte* v_smem;        ///< [keys, dim]
  std::byte* q_smem;        ///< 2 x [queries, dim]
  std::byte* d_o_smem;      ///< 2 x [queries, dim]
  std::byte* dscores_smem;  ///< [keys, queries]
  std::byte* weights_smem;  ///< [keys, queries], unless they stay
  float* top_smem;          ///< 2 x [queries]
  float* shift_smem;        ///< 2 x [queries]
  int* has_peak_smem;       ///< [keys]
  GroupFacts* facts_smem;
  OwnSums dk = {}, dv = {};

  __device__ BackwardBlock(const AttentionCall& call_, const BackwardBlocks& blocks,
                           const BackwardSpace& space_, std::byte* shared)
      : BackwardBlock(call_, blocks, space_, shared, blocks.turns.turn(blockIdx.x)) {}
  __device__ BackwardBlock(const AttentionCall& call_, const BackwardBlocks& blocks,
                           const BackwardSpace& space_, std::byte* shared, const Turn& turn)
      : call(call_),
        space(space_),
        b(static_cast<int>(turn.among(call.problem.heads_kv).b)),
        h(static_cast<int>(turn.among(call.problem.heads_kv).h)),
        dim_qk(static_cast<int>(call.problem.dim_qk)),
        dim_v(static_cast<int>(call.problem.dim_v)),
        unit(exponent_unit(call.scale)),
        scale(gradient_scale<T>(space.largest)),
        k_smem(shared),
        v_smem(k_smem + c.key_bytes()),
        q_smem(v_smem + c.key_bytes()),
        d_o_smem(q_smem + 2 * c.query_bytes()),
        dscores_smem(d_o_smem + 2 * c.query_bytes()),
        weights_smem(dscores_smem + (c.weights_stay ? 0 : c.pair_bytes())),
        top_smem(reinterpret_cast<float*>(weights_smem + c.pair_bytes())),
        shift_smem(top_smem + 2 * c.queries),
        has_peak_smem(reinterpret_cast<int*>(shift_smem + 2 * c.queries)),
        facts_smem(reinterpret_cast<GroupFacts*>(has_peak_smem + c.keys)) {
    const KeyTile keys = blocks.keys.tile(call, call.sequence(b), turn.tile);
    key_count = keys.count;
    first_key = static_cast<int>(keys.first);
  }

  /// The row of the first key in k and v. Not kept, nor is the sequence: registers are scarcer than time
  /// here.
  __device__ std::int64_t first_key_row() const { return call.sequence(b).first_k + first_key; }
  /// Where the scale is 0, a number so small that it makes no difference to any product but a hidden one's.
  static __device__ float exponent_unit(double scale_) {
    const auto unit_ = static_cast<float>(scale_ * 1.4426950408889634);
    return fabsf(unit_) < 1e-30f ? 1e-30f : unit_;
  }
  static __device__ std::uint32_t address(const std::byte* smem) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  }

  __device__ void load_keys() const {
    const std::int64_t s = first_key_row();
    load_strided_rows<c.keys, c.dim, c.threads()>(k_smem, row_of_halves(call.k, b, h, s), call.k.stride_s * 2,
                                                  key_count, dim_qk);
    load_strided_rows<c.keys, c.dim, c.threads()>(v_smem, row_of_halves(call.v, b, h, s), call.v.stride_s * 2,
                                                  key_count, dim_v);
  }
  /// A tile of queries: how many there are, and where its rows' values begin. Query r of it sees keys r +
  /// first to r + end of the tile of keys, as far as there are so many.
  struct Queries {
    std::int64_t row;
    int count;
    int first, end;
  };
  __device__ Queries queries_of(const QuerySteps& steps) const {
    const int at = steps.at * c.queries;
    constexpr std::int64_t far = 1 << 20;  // beyond any tile, and no sum of it overflows
    return {facts_smem->row + steps.head * call.rows_q() + at, min(c.queries, facts_smem->length - at),
            static_cast<int>(max(-far, min(far, facts_smem->low + at))),
            static_cast<int>(max(-far, min(far, facts_smem->high + at)))};
  }
  __device__ void load_queries(const QuerySteps& steps, int stage) const {
    const int at = steps.at * c.queries;
    const int count = min(c.queries, facts_smem->length - at);
    const auto first = [&](const std::byte* group, const Rows& rows) {
      return group + (steps.head * rows.stride_h + at * rows.stride_s) * 2;
    };
    load_strided_rows<c.queries, c.dim, c.threads()>(
        q_smem + stage * c.query_bytes(), first(facts_smem->q, call.q), call.q.stride_s * 2, count, dim_qk);
    load_strided_rows<c.queries, c.dim, c.threads()>(d_o_smem + stage * c.query_bytes(),
                                                     first(facts_smem->d_o, call.d_o), call.d_o.stride_s * 2,
                                                     count, dim_v);
    const int r = static_cast<int>(threadIdx.x);
    if (r >= c.queries) return;
    float* top = top_smem + stage * c.queries + r;
    float* shift = shift_smem + stage * c.queries + r;
    if (r < count) {
      const std::int64_t row = facts_smem->row + steps.head * call.rows_q() + at + r;
      copy_async_4(top, space.rows.top + row);
      copy_async_4(shift, space.rows.shift + row);
    } else {  // one that saw nothing
      *top = -minus_infinity;
      *shift = 0;
    }
  }

  /// Hides what the band hides, and keys past the end.
  __device__ void hide(const Queries& queries, int first_query, int first_key, PairSums& s) const {
    const float hidden = unit > 0 ? minus_infinity : -minus_infinity;  // whose exponent is minus infinity
    const int own = opaque(first_key + lane / 4);
    const int from = opaque(queries.first);
    const int to = opaque(queries.end);
#pragma unroll
    for (int n = 0; n < 2 * c.pair_query_tiles(); ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = first_query + 8 * n + 2 * (lane % 4) + e;
        const int first = r + from - own;
        const int last = min(r + to, key_count) - own;
#pragma unroll
        for (int m = 0; m < c.pair_key_tiles(); ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = 16 * m + 8 * half;
            if (key < first || key >= last) s[m][n][2 * half + e] = hidden;
          }
        }
      }
    }
  }

  /// Puts the peaks among a lane's pairs aside, the first time: weights are in `p`, d_o·v + shift in `x`.
  /// They are few, so that the code for one is there once.
  __device__ void take_peaks(bool rest, const Queries& queries, int first_query, int first_key,
                             const PairSums& p, PairSums& x) const {
    constexpr float weight_unit = 1.0f / static_cast<float>(1 << weight_bits<T>);
    constexpr int count = 8 * c.pair_query_tiles() * c.pair_key_tiles();
    static_assert(count <= 32, "a bit each");
    const auto at = [](auto& pairs, int index) -> auto& {
      return pairs[index / 4 % c.pair_key_tiles()][index / 4 / c.pair_key_tiles()][index % 4];
    };
    unsigned peaks = 0;
#pragma unroll
    for (int index = 0; index < count; ++index) {
      if (at(p, index) > least_peak / weight_unit) peaks |= 1u << index;
    }
#pragma unroll 1
    for (; peaks != 0; peaks &= peaks - 1) {
      const int chosen = __ffs(static_cast<int>(peaks)) - 1;
      Peak peak{};
#pragma unroll
      for (int index = 0; index < count; ++index) {
        if (index != chosen) continue;
        peak.weight = at(p, index) * weight_unit;
        peak.x = at(x, index) * (scale.down / weight_unit);
        at(x, index) = 0;
      }
      if (rest) continue;
      const int e = chosen % 4;
      const int n = chosen / 4 / c.pair_key_tiles();
      const int key = first_key + 16 * (chosen / 4 % c.pair_key_tiles()) + lane / 4 + 8 * (e / 2);
      const std::int64_t row = queries.row + first_query + 8 * n + 2 * (lane % 4) + e % 2;
      peak.key = first_key_row() + key;
      const int slot = atomicAdd(space.rows.peak_count + row, 1);
      if (slot < most_peaks) space.rows.peaks[row * most_peaks + slot] = peak;
      has_peak_smem[key] = 1;
    }
  }

  /// Whether some of the tile's queries from `first_query` on sees some of the keys from `first_key` on.
  __device__ bool seen(const Queries& queries, int first_query, int query_count, int first_key,
                       int keys) const {
    const int last_query = min(first_query + query_count, queries.count) - 1;
    if (first_query > last_query) return false;
    return first_query + queries.first < first_key + keys && last_query + queries.end > first_key;
  }

  /// Weights and score gradients of a warp's pairs, some queries at once; with weights that stay, their part
  /// of dv and dk too. Or the rest: what rounding took from them. Gives whether some weight is too high to be
  /// rounded.
  __device__ bool differentiate(bool rest, const Queries& queries, bool edge, int stage, int first_query) {
    constexpr int key_tiles = c.pair_key_tiles();
    constexpr int query_tiles = c.pair_query_tiles();
    const int first_key = warp / (c.warps / c.key_warps) * key_tiles * 16;
    const std::byte* q_tile = q_smem + stage * c.query_bytes();
    const std::byte* d_o_tile = d_o_smem + stage * c.query_bytes();
    PairFragments weights, dscores;
    if (edge && !seen(queries, first_query, c.queries_at_once, first_key, 16 * key_tiles)) {
      const PairFragments none = {};
      if constexpr (!c.weights_stay) store_pairs(weights_smem, first_query, first_key, none);
      store_pairs(dscores_smem, first_query, first_key, none);
      return false;
    }

    PairSums p = {}, x = {};
    multiply_tiles<T, c.dim / 16, key_tiles, query_tiles>(
        p, a_by_rows<key_tiles>(RowPointer::by_rows(address(k_smem)).from(first_key, 0)),
        b_by_rows(RowPointer::by_columns(address(q_tile)).from(first_query, 0)));
    if (edge) hide(queries, first_query, first_key, p);

    const float* tops = top_smem + stage * c.queries + first_query + 2 * (lane % 4);
    const float* shifts = shift_smem + stage * c.queries + first_query + 2 * (lane % 4);
    std::uint32_t highest = 0;
    float2 top;
    const auto weigh = [&](int n, int m, int half) {
      if (m == 0 && half == 0) {
        top = *reinterpret_cast<const float2*>(tops + 8 * n);
        top.x -= weight_bits<T>;
        top.y -= weight_bits<T>;
      }
      float& low = p[m][n][2 * half];
      float& high = p[m][n][2 * half + 1];
      low = exp2_approx(fmaf(low, unit, -top.x));
      high = exp2_approx(fmaf(high, unit, -top.y));
      const std::uint32_t two = pack<T>(low, high);
      weights[n / 2][m][n % 2 * 2 + half] = two;
      highest = maximum_of_pairs<T>(highest, two);
    };
    // Weights are made beside the product that does not need them.
    constexpr int steps = c.dim / 16;
    constexpr int pairs = 4 * query_tiles * key_tiles;
    multiply_tiles<T, steps, key_tiles, query_tiles>(
        x, a_by_rows<key_tiles>(RowPointer::by_rows(address(v_smem)).from(first_key, 0)),
        b_by_rows(RowPointer::by_columns(address(d_o_tile)).from(first_query, 0)),
        [&](const std::uint32_t(&)[key_tiles][4], int step) {
#pragma unroll
          for (int index = 0; index < pairs; ++index) {
            if (index * steps / pairs != step) continue;
            weigh(index / (2 * key_tiles), index / 2 % key_tiles, index % 2);
          }
        });
    const auto kept = [](const PairFragments& pairs) {
      return [&pairs](std::uint32_t(&to)[key_tiles][4], int step) {
#pragma unroll
        for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) to[m][e] = pairs[step][m][e];
        }
      };
    };
    if (rest) keep_rest(weights, p);
    if constexpr (c.weights_stay) {
      multiply_tiles<T, query_tiles, key_tiles, c.own_dim_tiles()>(
          dv, kept(weights), b_turned(RowPointer::by_rows(address(d_o_tile)).from(first_query, 0)));
    } else {
      store_pairs(weights_smem, first_query, first_key, weights);
    }

    const float x_unit = scale.up / static_cast<float>(1 << weight_bits<T>);
#pragma unroll
    for (int n = 0; n < 2 * query_tiles; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(shifts + 8 * n);
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float own = e % 2 == 0 ? shift.x : shift.y;
          x[m][n][e] = weight_bits<T> > 0 ? fmaf(x[m][n][e], x_unit, own * x_unit) : x[m][n][e] + own;
        }
      }
    }
    const float2 two_highest = unpack<T>(highest);
    const bool high =
        fmaxf(two_highest.x, two_highest.y) >= least_whole * static_cast<float>(1 << weight_bits<T>);
    static_assert(least_peak > least_whole);
    if (__any_sync(~0u, high)) take_peaks(rest, queries, first_query, first_key, p, x);
#pragma unroll
    for (int n = 0; n < 2 * query_tiles; ++n) {
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          x[m][n][2 * half] *= p[m][n][2 * half];
          x[m][n][2 * half + 1] *= p[m][n][2 * half + 1];
          dscores[n / 2][m][n % 2 * 2 + half] = pack<T>(x[m][n][2 * half], x[m][n][2 * half + 1]);
        }
      }
    }
    if (rest) keep_rest(dscores, x);
    store_pairs(dscores_smem, first_query, first_key, dscores);
    if constexpr (c.weights_stay) {
      multiply_tiles<T, query_tiles, key_tiles, c.own_dim_tiles()>(
          dk, kept(dscores), b_turned(RowPointer::by_rows(address(q_tile)).from(first_query, 0)));
    }
    return high;
  }

  using PairFragments = std::uint32_t[c.pair_query_tiles()][c.pair_key_tiles()][4];

  /// Leaves of rounded pairs what rounding took from them.
  static __device__ void keep_rest(PairFragments& pairs, const PairSums& whole) {
#pragma unroll
    for (int n = 0; n < 2 * c.pair_query_tiles(); ++n) {
#pragma unroll
      for (int m = 0; m < c.pair_key_tiles(); ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t& two = pairs[n / 2][m][n % 2 * 2 + half];
          const float2 rounded = unpack<T>(two);
          two = pack<T>(whole[m][n][2 * half] - rounded.x, whole[m][n][2 * half + 1] - rounded.y);
        }
      }
    }
  }

  /// Fragments of pairs to their place in shared memory.
  __device__ void store_pairs(std::byte* to_smem, int first_query, int first_key,
                              const PairFragments& pairs) const {
    // Rows 8 apart turn chunks alike, so that steps from here are an exclusive or and a constant.
    const int at = PairTile::offset(first_key + lane / 4, first_query / 8) + 4 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 2 * c.pair_query_tiles(); ++n) {
#pragma unroll
      for (int m = 0; m < c.pair_key_tiles(); ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int step = (at ^ (n * 16)) + (16 * m + 8 * half) * PairTile::row_bytes;
          *reinterpret_cast<std::uint32_t*>(to_smem + step) = pairs[n / 2][m][n % 2 * 2 + half];
        }
      }
    }
  }

  /// dv += weightsᵀ·d_o and dk += dscoresᵀ·q, from shared memory.
  __device__ void add_to_keys(int stage) {
    constexpr int key_tiles = c.own_key_tiles();
    constexpr int dim_tiles = c.own_dim_tiles();
    const WarpPlace<c.dim_warps> place(warp);
    const int first_key = place.m * key_tiles * 16;
    const int first_dim = place.n * dim_tiles;
    multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
        dv, a_by_rows<key_tiles>(PairPointer::by_rows(address(weights_smem)).from(first_key, 0)),
        b_turned(RowPointer::by_rows(address(d_o_smem + stage * c.query_bytes())).from(0, first_dim)));
    multiply_tiles<T, c.queries / 16, key_tiles, dim_tiles>(
        dk, a_by_rows<key_tiles>(PairPointer::by_rows(address(dscores_smem)).from(first_key, 0)),
        b_turned(RowPointer::by_rows(address(q_smem + stage * c.query_bytes())).from(0, first_dim)));
  }

  /// dq += dscores·k, and each query's sum of score gradients, which is a product with ones.
  __device__ void add_to_queries(const Queries& queries) {
    constexpr int query_tiles = c.dq_query_tiles();
    constexpr int dim_tiles = c.dq_dim_tiles();
    const WarpPlace<c.dq_dim_warps> place(warp);
    const int first_query = place.m * query_tiles * 16;
    const int first_dim = place.n * dim_tiles;
    const std::int64_t row = opaque(queries.row + first_query + lane / 4);
    Sums<query_tiles, dim_tiles> dq = {};
    float rest[query_tiles][4] = {};
    const auto dscores = PairPointer::by_columns(address(dscores_smem));
    multiply_tiles<T, c.keys / 16, query_tiles, dim_tiles>(
        dq, a_turned<query_tiles>(dscores.from(0, first_query / 16)),
        b_turned(RowPointer::by_rows(address(k_smem)).from(0, first_dim)));
    // The warps of the same queries share the keys.
    constexpr int keys_each = c.keys / c.dq_dim_warps;
    const auto load = a_turned<query_tiles>(dscores.from(place.n * keys_each, first_query / 16));
#pragma unroll
    for (int step = 0; step < keys_each / 16; ++step) {
      std::uint32_t a[query_tiles][4];
      load(a, step);
#pragma unroll
      for (int m = 0; m < query_tiles; ++m) multiply_matrices<T>(rest[m], a[m], two_ones<T>, two_ones<T>);
    }
    const int rows = queries.count - first_query - lane / 4;
    if (lane % 4 == 0) {
#pragma unroll
      for (int index = 0; index < 2 * query_tiles; ++index) {
        if (8 * index < rows) atomicAdd(space.rows.rest + row + 8 * index, rest[index / 2][index % 2 * 2]);
      }
    }
    if (space.dq == nullptr) return;
    float* first_dq = space.dq + row * space.dq_stride + 16 * first_dim + 4 * (lane % 4);
    const int present = space.dq_stride / 16 - first_dim;
    const auto add = [&](int index, int n) {
      const auto& low = dq[index / 2][2 * n];
      const auto& high = dq[index / 2][2 * n + 1];
      const int e = index % 2 * 2;
      add_4(first_dq + 8 * index * space.dq_stride + 16 * n, {low[e], low[e + 1], high[e], high[e + 1]});
    };
    if (queries.count == c.queries && present >= dim_tiles) {
#pragma unroll
      for (int index = 0; index < 2 * query_tiles; ++index) {
#pragma unroll
        for (int n = 0; n < dim_tiles; ++n) add(index, n);
      }
    } else {
#pragma unroll
      for (int index = 0; index < 2 * query_tiles; ++index) {
#pragma unroll
        for (int n = 0; n < dim_tiles; ++n) {
          if (8 * index < rows && n < present) add(index, n);
        }
      }
    }
  }

  __device__ void walk() {
    for (int r = static_cast<int>(threadIdx.x); r < c.keys; r += c.threads()) has_peak_smem[r] = 0;
    if (threadIdx.x == 0) *facts_smem = GroupFacts(call, b, h, first_key, key_count, c.queries);
    __syncthreads();  // the facts are there
    const GroupFacts& facts = *facts_smem;
    QuerySteps steps{.at = facts.first};
    if (!steps.more(facts)) return;
    load_keys();
    load_queries(steps, 0);
    commit_copies();
    bool rest = false;
    int stage = 0;
#pragma unroll 1
    while (steps.more(facts)) {
      if (!rest) wait_copies<0>();
      __syncthreads();  // the tile is there, and everyone is done with the last one and its score gradients
      QuerySteps next = steps;
      next.step(facts);
      if (!rest) {
        if (next.more(facts)) load_queries(next, stage ^ 1);
        commit_copies();
      }
      rest = add_pairs(rest, queries_of(steps), stage) && !rest;
      if (rest) continue;
      steps = next;
      stage ^= 1;
    }
  }

  /// What the pairs of a tile of queries add to all gradients, or the rest of it. Gives whether a rest
  /// matters.
  __device__ bool add_pairs(bool rest, const Queries& queries, int stage) {
    const bool edge = queries.count - 1 + queries.first > 0 || min(queries.end, key_count) < c.keys;
    constexpr int queries_each = c.queries / (c.warps / c.key_warps);
    const int own_first = warp % (c.warps / c.key_warps) * queries_each;
    bool high = false;
#pragma unroll 1
    for (int n = 0; n < queries_each; n += c.queries_at_once) {
      high |= differentiate(rest, queries, edge, stage, own_first + n);
    }
    high = __syncthreads_or(high) != 0;  // score gradients are there
    if constexpr (!c.weights_stay) add_to_keys(stage);
    add_to_queries(queries);
    return high;
  }

  /// A lane's sums, times a factor, to a tile in shared memory.
  __device__ void stage_own(std::byte* to_smem, const OwnSums& sums, float factor) const {
    const WarpPlace<c.dim_warps> place(warp);
    const int first_key = place.m * c.own_key_tiles() * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < c.own_key_tiles(); ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2 * c.own_dim_tiles(); ++n) {
          const int chunk = place.n * 2 * c.own_dim_tiles() + n;
          *reinterpret_cast<std::uint32_t*>(to_smem + RowTile::offset(first_key + 16 * m + 8 * half, chunk) +
                                            4 * (lane % 4)) =
              pack<T>(sums[m][n][2 * half] * factor, sums[m][n][2 * half + 1] * factor);
        }
      }
    }
  }
  __device__ void store_rows(const Rows& rows, int dims, const std::byte* from_smem) const {
    if (!rows.wanted) return;
    std::byte* first = row_of_halves(rows, b, h, first_key_row());
#pragma unroll 4
    for (int index = static_cast<int>(threadIdx.x); index < c.keys * RowTile::chunks; index += c.threads()) {
      const int row = index / RowTile::chunks;
      const int chunk = index % RowTile::chunks;
      if (row >= key_count || chunk * 8 >= dims) continue;
      store_eight(first + row * rows.stride_s * 2, chunk * 8, dims, true,
                  *reinterpret_cast<const uint4*>(from_smem + RowTile::offset(row, chunk)));
    }
  }
  /// Rows of dk that are still to be mended, in f32.
  __device__ void store_unfinished() const {
    const std::int64_t first_row = BackwardSpace::key_row(call, b, h, first_key_row());
    for (int r = static_cast<int>(threadIdx.x); r < key_count; r += c.threads()) {
      space.key_has_peak[first_row + r] = static_cast<std::uint8_t>(has_peak_smem[r]);
    }
    const WarpPlace<c.dim_warps> place(warp);
#pragma unroll
    for (int m = 0; m < c.own_key_tiles(); ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = place.m * c.own_key_tiles() * 16 + 16 * m + 8 * half + lane / 4;
        if (r >= key_count || has_peak_smem[r] == 0) continue;
        float* to = space.dk + (first_row + r) * dim_qk;
#pragma unroll
        for (int n = 0; n < 2 * c.own_dim_tiles(); ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int d = place.n * c.own_dim_tiles() * 16 + 8 * n + 2 * (lane % 4) + e;
            if (d < dim_qk) to[d] = dk[m][n][2 * half + e];
          }
        }
      }
    }
  }

  __device__ void finish() const {
    __syncthreads();  // everyone is done with keys and values, and peaks are known
    stage_own(k_smem, dk, static_cast<float>(call.scale) * scale.down);
    stage_own(v_smem, dv, 1.0f / static_cast<float>(1 << weight_bits<T>));
    if (call.dk.wanted) store_unfinished();
    __syncthreads();  // the rows are there
    store_rows(call.dk, dim_qk, k_smem);
    store_rows(call.dv, dim_v, v_smem);
  }
};

/// The kernel of one row of a table.
template <typename T, typename Table, int row>
__global__ void __launch_bounds__(Table::rows[row].threads(), Table::rows[row].blocks)
    backward_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ BackwardBlocks blocks,
                    const __grid_constant__ BackwardSpace space) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) std::byte shared[];
  BackwardBlock<T, Table::rows[row]> block(call, blocks, space, shared);
  if (block.key_count <= 0) return;
  block.walk();
  block.finish();
#endif
}

}  // namespace tilewise::cuda::mma
